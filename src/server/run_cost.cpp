// SPDX-License-Identifier: Apache-2.0
#include "server/run_cost.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace ikbo::server {
namespace {

constexpr int kSettled = 8;        // runs after which a surprise is doubted
constexpr double kSurprise = 2;    // and counts as this many times what was expected, at most
constexpr double kMemory = 0.98;   // weight of a run against the one after it
constexpr double kInertia = 1e-8;  // weight of the last fit, for what the runs do not tell
constexpr double kErrorMemory = 0.9;
constexpr double kLeastSeconds = 1e-6;
constexpr unsigned kAllParts = 7;

using Vector = std::array<double, 3>;
using Matrix = std::array<Vector, 3>;

bool has(unsigned parts, std::size_t i) { return (parts >> i & 1) != 0; }

// The solution of a * x = b over the chosen rows and columns of a positive definite matrix; zero
// elsewhere.
Vector solve(Matrix a, Vector b, unsigned parts) {
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      if (!has(parts, i) || !has(parts, j)) {
        a[i][j] = i == j ? 1 : 0;
      }
    }
    b[i] = has(parts, i) ? b[i] : 0;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t row = i + 1; row < 3; ++row) {
      const double factor = a[row][i] / a[i][i];
      for (std::size_t j = i; j < 3; ++j) {
        a[row][j] -= factor * a[i][j];
      }
      b[row] -= factor * b[i];
    }
  }
  Vector x{};
  for (std::size_t i = 3; i-- > 0;) {
    x[i] = b[i];
    for (std::size_t j = i + 1; j < 3; ++j) {
      x[i] -= a[i][j] * x[j];
    }
    x[i] /= a[i][i];
  }
  return x;
}

// x * a * x - 2 * b * x
double loss(const Matrix& a, const Vector& b, const Vector& x) {
  double sum = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      sum += x[i] * a[i][j] * x[j];
    }
    sum -= 2 * b[i] * x[i];
  }
  return sum;
}

double dot(const Vector& a, const Vector& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

}  // namespace

RunCost::RunCost(std::int64_t max_users, std::int64_t max_candidates)
    : user_scale_(1.0 / static_cast<double>(std::max<std::int64_t>(max_users, 1))),
      candidate_scale_(1.0 / static_cast<double>(std::max<std::int64_t>(max_candidates, 1))) {}

RunCost::Vector RunCost::features(std::int64_t num_users, std::int64_t num_candidates) const {
  return {1, static_cast<double>(num_users) * user_scale_,
          static_cast<double>(num_candidates) * candidate_scale_};
}

void RunCost::add(std::int64_t num_users, std::int64_t num_candidates, double seconds) {
  const Vector x = features(num_users, num_candidates);
  const double expected = dot(parts_, x);
  seconds = std::max(seconds, kLeastSeconds);
  if (expected > 0) {
    const double error = std::min(std::abs(seconds / expected - 1), 1.0);
    error_ = kErrorMemory * error_ + (1 - kErrorMemory) * error;
  }
  if (num_runs_ == kSettled) {
    seconds = std::min(seconds, std::max(kSurprise * expected, kLeastSeconds));
  } else {
    ++num_runs_;
  }
  const double weight = 1 / seconds;
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      squares_[i][j] = kMemory * squares_[i][j] + weight * x[i] * x[j];
    }
    products_[i] = kMemory * products_[i] + weight * x[i] * seconds;
  }
  fit();
}

// Least squares without negative parts. There are only seven ways to choose which parts are not
// zero, and the best of those that come out non-negative is the solution.
void RunCost::fit() {
  Matrix a = squares_;
  Vector b = products_;
  const double inertia = kInertia * squares_[0][0];
  for (std::size_t i = 0; i < 3; ++i) {
    a[i][i] += inertia;
    b[i] += inertia * parts_[i];
  }
  Vector best{};
  for (unsigned parts = 1; parts <= kAllParts; ++parts) {
    const Vector x = solve(a, b, parts);
    if (*std::min_element(x.begin(), x.end()) >= 0 && loss(a, b, x) < loss(a, b, best)) {
      best = x;
    }
  }
  parts_ = best;
}

double RunCost::seconds(std::int64_t num_users, std::int64_t num_candidates) const {
  return dot(parts_, features(num_users, num_candidates));
}

double RunCost::careful_seconds(std::int64_t num_users, std::int64_t num_candidates) const {
  constexpr double kErrors = 2;
  constexpr double kLeastMargin = 0.2;
  return seconds(num_users, num_candidates) * (1 + std::max(kErrors * error_, kLeastMargin));
}

double RunCost::seconds_of_rows(std::int64_t num_users, std::int64_t num_candidates) const {
  return seconds(num_users, num_candidates) - parts_[0];
}

double RunCost::rows_of_next_run(double waiting, std::size_t num_workers) const {
  constexpr double kMostRuns = 8;
  return std::max(std::sqrt(parts_[0] * waiting / static_cast<double>(num_workers)),
                  waiting / kMostRuns);
}

}  // namespace ikbo::server
