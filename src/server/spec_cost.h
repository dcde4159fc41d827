// SPDX-License-Identifier: Apache-2.0
// FLOPs and bytes of a run, as the package's compilation spec has them: formulas in its users U and
// candidates B.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ikbo::server {

// A sum of terms like 8*U*B^2.
class Formula {
 public:
  // Adds what Formula of python/ikbo/transform/cost.py wrote. Throws ikbo::Error for anything else.
  void add(std::string_view text);
  double at(std::int64_t num_users, std::int64_t num_candidates) const;

 private:
  struct Term {
    double factor = 1;
    int users = 0;  // powers
    int candidates = 0;
  };
  static Term parse(std::string_view text);

  std::vector<Term> terms_;
};

struct Cost {
  double flops = 0;
  double bytes = 0;
};

class SpecCosts {
 public:
  // Nothing is known without a spec and of one of another version. Throws ikbo::Error that names
  // what is wrong with a spec.
  static SpecCosts of_spec(std::string_view spec_json);

  bool are_known() const { return is_known_; }
  // Of a run as the package does it.
  Cost at(std::int64_t num_users, std::int64_t num_candidates) const;
  // Of the unmodified model, with the users' rows repeated for their candidates.
  Cost replicated_at(std::int64_t num_users, std::int64_t num_candidates) const;

 private:
  struct Formulas {
    Formula flops;
    Formula bytes;

    Cost at(std::int64_t num_users, std::int64_t num_candidates) const;
  };
  // Sizes, both ends included, at which the package runs the unmodified form.
  struct Range {
    std::int64_t users[2] = {};
    std::int64_t candidates[2] = {};
  };

  bool is_known_ = false;
  Formulas before_;
  Formulas after_;
  std::vector<Range> replicated_;
};

}  // namespace ikbo::server
