// SPDX-License-Identifier: Apache-2.0
// A JSON value together with its place in the document, so that every error can name both.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ikbo/error.h"

namespace ikbo::runtime {

// Accessors throw ikbo::Error "<origin>: <path> must be <requirement>; got <value>".
class JsonField {
 public:
  JsonField(std::string_view origin, std::string path, simdjson::dom::element value)
      : origin_(origin), path_(std::move(path)), value_(value) {}

  // The member of an object; throws when it is missing.
  JsonField at(std::string_view key) const {
    const std::optional<JsonField> member = find(key);
    IKBO_CHECK(member.has_value(), origin_, ": ", child_path(key), " is missing");
    return *member;
  }

  // The same, or nothing when it is missing or null.
  std::optional<JsonField> find(std::string_view key) const {
    simdjson::dom::object object;
    require(value_.get(object) == simdjson::SUCCESS, "an object");
    simdjson::dom::element member;
    if (object.at_key(key).get(member) != simdjson::SUCCESS || member.is_null()) {
      return std::nullopt;
    }
    return JsonField(origin_, child_path(key), member);
  }

  std::vector<JsonField> elements() const {
    simdjson::dom::array array;
    require(value_.get(array) == simdjson::SUCCESS, "an array");
    std::vector<JsonField> fields;
    for (const simdjson::dom::element element : array) {
      fields.emplace_back(origin_, path_ + "[" + std::to_string(fields.size()) + "]", element);
    }
    return fields;
  }

  std::string text() const {
    std::string_view text;
    require(value_.get(text) == simdjson::SUCCESS && !text.empty(), "a non-empty string");
    return std::string(text);
  }

  std::vector<std::string> texts() const {
    std::vector<std::string> texts;
    for (const JsonField& element : elements()) {
      texts.push_back(element.text());
    }
    return texts;
  }

  std::int64_t integer(std::int64_t low, std::int64_t high) const {
    std::int64_t number = 0;
    require(value_.get(number) == simdjson::SUCCESS && number >= low && number <= high,
            "an integer in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
    return number;
  }

  double tolerance() const {
    double number = 0;
    require(value_.get(number) == simdjson::SUCCESS && number >= 0, "a number >= 0");
    return number;
  }

  std::string minified() const { return simdjson::minify(value_); }

  // Throws unless `holds`.
  void require(bool holds, std::string_view requirement) const {
    IKBO_CHECK(holds, origin_, ": ", path_.empty() ? "the document" : path_, " must be ",
               requirement, "; got ", excerpt());
  }

 private:
  std::string child_path(std::string_view key) const {
    return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  }

  // The value as JSON, shortened.
  std::string excerpt() const {
    constexpr std::size_t kMaxLength = 80;
    const std::string text = minified();
    return text.size() <= kMaxLength ? text : text.substr(0, kMaxLength) + "...";
  }

  std::string_view origin_;  // outlives the field
  std::string path_;         // "inputs[2].dtype"; empty for the document itself
  simdjson::dom::element value_;
};

}  // namespace ikbo::runtime
