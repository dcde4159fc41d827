// SPDX-License-Identifier: Apache-2.0
#include "server/warm_up.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "server/aligned_buffer.h"

namespace ikbo::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kMeasuringTime{1};

AlignedBuffer made_up_rows(const runtime::TensorSpec& spec, std::int64_t rows,
                           std::int64_t num_users) {
  const std::size_t bytes = static_cast<std::size_t>(rows) * spec.row_bytes();
  AlignedBuffer data = make_aligned_buffer(bytes);
  std::memset(data.get(), 0, bytes);
  if (spec.role == runtime::Role::kIndex) {
    for (std::int64_t b = 0; b < rows; ++b) {
      const auto user = static_cast<std::int32_t>(b % num_users);
      std::memcpy(data.get() + static_cast<std::size_t>(b) * sizeof(user), &user, sizeof(user));
    }
  } else if (spec.values.has_value() && spec.values->min > 0) {
    // The low bytes of a little-endian integer are the same integer, narrowed.
    const std::size_t size = size_of(spec.dtype);
    for (std::size_t at = 0; at < bytes; at += size) {
      std::memcpy(data.get() + at, &spec.values->min, size);
    }
  }
  return data;
}

}  // namespace

void run_made_up(runtime::Session& session, const runtime::Manifest& manifest,
                 std::int64_t num_users, std::int64_t num_candidates) {
  runtime::RunInputs inputs;
  inputs.bypasses_user_cache = true;  // its users are nobody, and what runs take is to be learnt
  inputs.num_users = manifest.has_users() ? num_users : 0;
  inputs.num_candidates = num_candidates;
  std::vector<AlignedBuffer> storage;
  for (const runtime::TensorSpec& spec : manifest.inputs) {
    const std::int64_t rows = runtime::num_rows(spec.role, num_users, num_candidates);
    storage.push_back(made_up_rows(spec, rows, num_users));
    runtime::Shape shape = spec.shape;
    shape[0] = rows;
    inputs.tensors.push_back({spec.dtype, std::move(shape), storage.back().get(),
                              static_cast<std::size_t>(rows) * spec.row_bytes()});
  }
  session.run(inputs);
}

void measure_runs(
    runtime::Session& session, const runtime::Manifest& manifest, std::int64_t max_users,
    std::int64_t max_candidates,
    const std::function<void(std::int64_t, std::int64_t, Clock::duration)>& measured) {
  const std::int64_t users = std::max<std::int64_t>(max_users, 1);
  const std::int64_t some_users = std::max<std::int64_t>(users / 4, 1);
  const std::int64_t some_candidates = std::max<std::int64_t>(max_candidates / 4, 1);
  const std::pair<std::int64_t, std::int64_t> sizes[] = {{1, 1},
                                                         {1, some_candidates},
                                                         {some_users, some_candidates},
                                                         {1, max_candidates},
                                                         {users, max_candidates}};
  const auto begin = Clock::now();
  Clock::duration last{};
  for (const auto& [num_users, num_candidates] : sizes) {
    // The next size is at most four times as large.
    if (Clock::now() - begin + 8 * last > kMeasuringTime) {
      return;
    }
    run_made_up(session, manifest, num_users, num_candidates);
    const auto warm = Clock::now();
    run_made_up(session, manifest, num_users, num_candidates);
    last = Clock::now() - warm;
    measured(num_users, num_candidates, last);
  }
}

}  // namespace ikbo::server
