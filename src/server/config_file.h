// SPDX-License-Identifier: Apache-2.0
// The configuration file and the environment as sources of flags. A flag on the command line wins
// over IKBO_OPTION_<FLAG> in the environment, and this over `flag = value` in the file.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace ikbo::server {

// Adds --config and the environment to all flags that `app` has so far. Unknown keys in the file,
// keys given twice (but for flags that take several values) and lines that are no `key = value` end
// the parse with an error that names file and line.
void add_config_sources(CLI::App& app);

// Throws CLI::ParseError for a variable with that prefix that stands for no flag.
void refuse_unknown_variables(const CLI::App& app);

// All flags that a file may hold with the values in force, in the file's own form.
std::string config_text(const CLI::App& app);

}  // namespace ikbo::server
