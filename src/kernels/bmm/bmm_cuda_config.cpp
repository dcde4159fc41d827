// SPDX-License-Identifier: Apache-2.0
// Which CUDA kernel of bmm runs for which params.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>

#include "ikbo/bmm_cuda.h"
#include "kernels/bmm/bmm_layout.h"

namespace ikbo {
namespace {

using namespace bmm_impl;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Matrices {
  const void* data;
  std::int64_t stride_batch;
  std::int64_t stride_sum;
  std::int64_t stride_out;
};

// The dimension along which 16-byte copies can go, if there is one: they need 16-byte alignment of
// the base and of the other strides.
std::optional<BmmInner> aligned_inner(const Matrices& m, bool may_be_zero) {
  const auto fits = [&](std::int64_t inner, std::int64_t outer) {
    const std::int64_t least = may_be_zero ? 0 : 1;
    return inner == 1 && outer % 8 == 0 && outer >= least && m.stride_batch % 8 == 0 &&
           m.stride_batch >= least;
  };
  if (reinterpret_cast<std::uintptr_t>(m.data) % 16 != 0) return std::nullopt;
  if (fits(m.stride_sum, m.stride_out)) return BmmInner::kSum;
  if (fits(m.stride_out, m.stride_sum)) return BmmInner::kOut;
  return std::nullopt;
}

// Whether every tile is a few boxes of the copy engine.
bool has_whole_boxes(const BmmParams& p, BmmInner inner) {
  const bool is_whole_slice = p.n % kTileColumns == 0;
  return is_whole_slice || (inner == BmmInner::kSum && p.n % 8 == 0 && kTileColumns % p.n == 0);
}

// How many matrices of a user and how many stages fit into shared memory beside each other; no
// slot where not even one matrix does.
void divide_shared_memory(BmmCudaConfig& config, int num_blocks, int wanted_slots) {
  constexpr int kFewStages = 4;
  const auto fits = [&](int slots, int stages) {
    BmmCudaConfig tried = config;
    tried.user_slots = slots;
    tried.stages = stages;
    return shared_bytes(tried, num_blocks) <= kMaxSharedBytes;
  };
  config.user_slots = 0;
  while (config.user_slots < wanted_slots && fits(config.user_slots + 1, kFewStages)) {
    ++config.user_slots;
  }
  config.stages = kFewStages;
  while (config.stages < kMaxStages && fits(config.user_slots, config.stages + 1)) {
    ++config.stages;
  }
}

// The widest tile of P with which the next user's matrix is loaded beside the current one, and with
// which every multiprocessor has a tile: a wider one reads b_cand less often.
void select_tile(BmmCudaConfig& config, const BmmParams& p, int num_sms) {
  const int num_blocks = blocks_of(p.r);
  const std::int64_t column_tiles = ceil_div(std::int64_t{p.num_candidates} * p.n, kTileColumns);
  // Matrices that fill little of shared memory change often: several are loaded ahead.
  const int wanted_slots = p.num_users == 1 ? 1 : 4;
  for (const int tile_p : {256, 192, 128, 64}) {
    config.tile_p = tile_p;
    divide_shared_memory(config, num_blocks, wanted_slots);
    const bool is_narrowest = tile_p == 64;
    const bool is_too_wide = !is_narrowest && ceil_div(p.p, tile_p - 64) == ceil_div(p.p, tile_p);
    const bool fills_device = column_tiles * ceil_div(p.p, tile_p) >= num_sms;
    if (!is_too_wide && fills_device && config.user_slots >= std::min(wanted_slots, 2)) return;
    if (is_narrowest) return;
  }
}

std::optional<BmmCudaConfig> select_sm90(const BmmParams& p, const DeviceLimits& limits) {
  if (limits.compute_capability != 90 || size_of(p.dtype) != 2) return std::nullopt;
  // The copy engine reads a_user, so that strides of 0 are none for it.
  const auto a_inner = aligned_inner({p.a_user, p.stride_a_u, p.stride_a_r, p.stride_a_p}, false);
  const auto b_inner = aligned_inner({p.b_cand, p.stride_b_b, p.stride_b_r, p.stride_b_n}, true);
  const bool fits = a_inner && b_inner && p.n % 8 == 0 && p.r > 0 && p.num_users > 0 &&
                    reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0;
  if (!fits) return std::nullopt;
  BmmCudaConfig config{.kernel = BmmKernel::kSm90, .a_inner = *a_inner, .b_inner = *b_inner};
  const bool has_strides = p.stride_b_b > 0 && p.stride_b_r > 0 && p.stride_b_n > 0;
  config.feed = has_strides && has_whole_boxes(p, *b_inner) ? BmmFeed::kTma : BmmFeed::kAsync;
  select_tile(config, p, limits.num_sms);
  if (config.user_slots == 0) return std::nullopt;
  return config;
}

}  // namespace

std::string to_string(const BmmCudaConfig& config) {
  switch (config.kernel) {
    case BmmKernel::kNone:
      return "composite";
    case BmmKernel::kMma:
      return "bmm_mma";
    case BmmKernel::kSimt:
      return "bmm_simt";
    case BmmKernel::kSm90:
      break;
  }
  std::ostringstream text;
  text << "bmm_sm90<tile_p=" << config.tile_p
       << ",a=" << (config.a_inner == BmmInner::kSum ? "r" : "p")
       << ",b=" << (config.b_inner == BmmInner::kSum ? "r" : "n")
       << ",feed=" << (config.feed == BmmFeed::kTma ? "tma" : "async")
       << ",users=" << config.user_slots << ",stages=" << config.stages << ">";
  return text.str();
}

BmmCudaConfig select_bmm_cuda_config(const BmmParams& params, const DeviceLimits& limits) {
  // Columns of all candidates are counted in int32.
  const std::int64_t columns = std::int64_t{params.num_candidates} * params.n;
  const bool is_64_bit = size_of(params.dtype) == 8;
  if (is_64_bit || limits.compute_capability < 80 ||
      columns > std::numeric_limits<std::int32_t>::max() - kTileColumns) {
    return {};
  }
  if (const auto config = select_sm90(params, limits)) return *config;
  return {.kernel = size_of(params.dtype) == 2 ? BmmKernel::kMma : BmmKernel::kSimt};
}

std::size_t bmm_workspace_bytes(const BmmParams& params, const BmmCudaConfig& config) {
  if (config.kernel == BmmKernel::kNone) return 0;
  return make_workspace_layout(params).total_bytes;
}

}  // namespace ikbo
