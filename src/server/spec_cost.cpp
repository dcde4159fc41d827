// SPDX-License-Identifier: Apache-2.0
#include "server/spec_cost.h"

#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "ikbo/error.h"

namespace ikbo::server {
namespace {

constexpr std::int64_t kSpecVersion = 1;

// Calls `use` with each part of `text` between two separators.
template <typename Use>
void split(std::string_view text, std::string_view separator, const Use& use) {
  for (;;) {
    const std::size_t end = text.find(separator);
    use(text.substr(0, end));
    if (end == std::string_view::npos) {
      return;
    }
    text.remove_prefix(end + separator.size());
  }
}

template <typename T>
bool read_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string_view text_at(simdjson::dom::element object, std::string_view key) {
  std::string_view text;
  IKBO_CHECK(object[key].get(text) == simdjson::SUCCESS, "compilation spec: ", key,
             " must be a string; got ", simdjson::minify(object));
  return text;
}

simdjson::dom::array array_at(simdjson::dom::element object, std::string_view key) {
  simdjson::dom::array array;
  IKBO_CHECK(object[key].get(array) == simdjson::SUCCESS, "compilation spec: ", key,
             " must be an array; it is missing or something else");
  return array;
}

void read_range(simdjson::dom::element variant, std::string_view key, std::int64_t (&range)[2]) {
  const simdjson::dom::array ends = array_at(variant, key);
  IKBO_CHECK(ends.size() == 2 && ends.at(0).get(range[0]) == simdjson::SUCCESS &&
                 ends.at(1).get(range[1]) == simdjson::SUCCESS,
             "compilation spec: ", key, " of a variant must be two integers; got ",
             simdjson::minify(ends));
}

bool is_within(std::int64_t value, const std::int64_t (&range)[2]) {
  return value >= range[0] && value <= range[1];
}

}  // namespace

Formula::Term Formula::parse(std::string_view text) {
  Term term;
  split(text, "*", [&](std::string_view piece) {
    const char first = piece.empty() ? '\0' : piece[0];
    if (first != 'U' && first != 'B') {
      double factor = 0;
      IKBO_CHECK(read_number(piece, factor) && std::isfinite(factor),
                 "compilation spec: a formula must be a sum of terms like 8*U*B^2; got ", text);
      term.factor *= factor;
      return;
    }
    int power = 1;
    IKBO_CHECK(piece.size() == 1 || (piece[1] == '^' && read_number(piece.substr(2), power)),
               "compilation spec: a formula must be a sum of terms like 8*U*B^2; got ", text);
    (first == 'U' ? term.users : term.candidates) += power;
  });
  return term;
}

void Formula::add(std::string_view text) {
  split(text, " + ", [this](std::string_view part) {
    const Term added = parse(part);
    const auto same = std::find_if(terms_.begin(), terms_.end(), [&](const Term& term) {
      return term.users == added.users && term.candidates == added.candidates;
    });
    if (same != terms_.end()) {
      same->factor += added.factor;
    } else if (added.factor != 0) {
      terms_.push_back(added);
    }
  });
}

double Formula::at(std::int64_t num_users, std::int64_t num_candidates) const {
  double sum = 0;
  for (const Term& term : terms_) {
    sum += term.factor * std::pow(static_cast<double>(num_users), term.users) *
           std::pow(static_cast<double>(num_candidates), term.candidates);
  }
  return sum;
}

Cost SpecCosts::Formulas::at(std::int64_t num_users, std::int64_t num_candidates) const {
  return {flops.at(num_users, num_candidates), bytes.at(num_users, num_candidates)};
}

SpecCosts SpecCosts::of_spec(std::string_view spec_json) {
  SpecCosts costs;
  simdjson::dom::parser parser;
  simdjson::dom::element spec;
  std::int64_t version = 0;
  if (parser.parse(spec_json.data(), spec_json.size()).get(spec) != simdjson::SUCCESS ||
      spec["version"].get(version) != simdjson::SUCCESS || version != kSpecVersion) {
    return costs;
  }
  costs.is_known_ = true;
  for (const simdjson::dom::element row : array_at(spec, "rows")) {
    costs.before_.flops.add(text_at(row, "flops_before"));
    costs.before_.bytes.add(text_at(row, "bytes_before"));
    costs.after_.flops.add(text_at(row, "flops_after"));
    costs.after_.bytes.add(text_at(row, "bytes_after"));
  }
  for (const simdjson::dom::element variant : array_at(spec, "variants")) {
    if (text_at(variant, "form") == "replicated") {
      Range& range = costs.replicated_.emplace_back();
      read_range(variant, "users", range.users);
      read_range(variant, "candidates", range.candidates);
    }
  }
  return costs;
}

Cost SpecCosts::at(std::int64_t num_users, std::int64_t num_candidates) const {
  const bool is_replicated =
      std::any_of(replicated_.begin(), replicated_.end(), [&](const Range& range) {
        return is_within(num_users, range.users) && is_within(num_candidates, range.candidates);
      });
  return (is_replicated ? before_ : after_).at(num_users, num_candidates);
}

Cost SpecCosts::replicated_at(std::int64_t num_users, std::int64_t num_candidates) const {
  return before_.at(num_users, num_candidates);
}

}  // namespace ikbo::server
