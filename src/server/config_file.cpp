// SPDX-License-Identifier: Apache-2.0
#include "server/config_file.h"

#include <unistd.h>

#include <cstdlib>
#include <istream>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace ikbo::server {
namespace {

constexpr std::string_view kPrefix = "IKBO_OPTION_";

// "--grpc-port" or "grpc-port" to "IKBO_OPTION_GRPC_PORT".
std::string variable_of(const std::string& name) {
  std::string variable(kPrefix);
  for (const char c : name.substr(name.find_first_not_of('-'))) {
    variable += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  }
  return variable;
}

bool has_variable(const std::string& name) {
  const char* value = std::getenv(variable_of(name).c_str());
  return value != nullptr && *value != '\0';
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r";
  const std::size_t first = text.find_first_not_of(kSpace);
  return first == std::string_view::npos
             ? std::string_view()
             : text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

bool is_file_key(const CLI::Option& option) {
  return option.get_configurable() && !option.get_lnames().empty();
}

class FileFormat final : public CLI::Config {
 public:
  explicit FileFormat(const CLI::App& app) : app_(app) {}

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> items;
    std::string line;
    for (int number = 1; std::getline(input, line); ++number) {
      const std::string_view text = trimmed(line);
      if (!text.empty() && text.front() != '#') {
        add(number, text, items);
      }
    }
    // The environment is read after the file, and only for flags without a value.
    std::erase_if(items, [](const CLI::ConfigItem& item) { return has_variable(item.name); });
    return items;
  }

  std::string to_config(const CLI::App*, bool, bool, std::string) const override {
    return config_text(app_);
  }

 private:
  void add(int number, std::string_view text, std::vector<CLI::ConfigItem>& items) const {
    const std::size_t equals = text.find('=');
    const std::string key(trimmed(text.substr(0, equals)));
    const std::string value(equals == std::string_view::npos ? ""
                                                             : trimmed(text.substr(equals + 1)));
    if (key.empty() || value.empty()) {
      fail(number, "a line must be 'key = value', a comment or empty; got '", text, "'");
    }
    const CLI::Option* option = app_.get_option_no_throw("--" + key);
    if (option == nullptr || !is_file_key(*option)) {
      fail(number, "a key must be a flag of --help without its dashes; got '", key, "'");
    }
    for (CLI::ConfigItem& earlier : items) {
      if (earlier.name == key && option->get_items_expected_max() == 1) {
        fail(number, "a key must be given once; got '", key, "' again");
      }
      if (earlier.name == key) {
        return earlier.inputs.push_back(value);
      }
    }
    CLI::ConfigItem item;
    item.name = key;
    item.inputs = {value};
    items.push_back(std::move(item));
  }

  template <typename... Parts>
  [[noreturn]] void fail(int number, const Parts&... parts) const {
    std::ostringstream text;
    text << "--config: " << app_.get_config_ptr()->as<std::string>() << ":" << number << ": ";
    (text << ... << parts);
    throw CLI::FileError(text.str());
  }

  const CLI::App& app_;
};

}  // namespace

void add_config_sources(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (is_file_key(*option)) {
      option->envname(variable_of(option->get_lnames().front()));
    }
  }
  const char* from_environment = std::getenv(variable_of("config").c_str());
  const std::string path = from_environment == nullptr ? "" : from_environment;
  app.set_config("--config", path,
                 "File of 'flag = value' lines; the command line and the environment "
                 "(IKBO_OPTION_GRPC_PORT for --grpc-port) win over it",
                 !path.empty());
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.config_formatter(std::make_shared<FileFormat>(app));
}

void refuse_unknown_variables(const CLI::App& app) {
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with(kPrefix)) {
      continue;
    }
    bool is_known = name == variable_of("config");
    for (const CLI::Option* option : app.get_options()) {
      is_known = is_known || option->get_envname() == name;
    }
    if (!is_known) {
      throw CLI::ParseError("environment: " + std::string(name) +
                                " must stand for a flag of --help; there is no such flag",
                            CLI::ExitCodes::ConfigError);
    }
  }
}

std::string config_text(const CLI::App& app) {
  std::string text;
  for (const CLI::Option* option : app.get_options()) {
    if (!is_file_key(*option)) {
      continue;
    }
    std::vector<std::string> values = option->results();
    if (values.empty() && !option->get_default_str().empty()) {
      values = {option->get_default_str()};
    }
    for (const std::string& value : values) {
      text += option->get_lnames().front() + " = " + value + "\n";
    }
  }
  return text;
}

}  // namespace ikbo::server
