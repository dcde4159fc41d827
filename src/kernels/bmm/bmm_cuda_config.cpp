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

// Whether every tile is a few boxes of the copy engine; a row of a box has at least `least`
// columns.
bool has_whole_boxes(int n, int least) {
  return n % kTileColumns == 0 || (n >= least && kTileColumns % n == 0);
}

BmmFeed select_feed(const BmmParams& p, BmmInner inner) {
  const bool has_strides = p.stride_b_b > 0 && p.stride_b_r > 0 && p.stride_b_n > 0;
  // A row of 8 columns, 16 bytes, is too little for a request of the copy engine.
  const bool has_boxes = has_whole_boxes(p.n, inner == BmmInner::kOut ? 16 : 8);
  return has_strides && has_boxes ? BmmFeed::kTma : BmmFeed::kAsync;
}

BmmStore select_store(const BmmParams& p) {
  if (p.n == 1) return BmmStore::kAlongP;
  // The rows of a box are 64 elements of a candidate's result, which must be whole rows.
  const bool has_rows = std::int64_t{p.p} * p.n % kTileColumns == 0;
  return has_whole_boxes(p.n, 8) && has_rows ? BmmStore::kTma : BmmStore::kVectors;
}

bool fits_shared(BmmCudaConfig config, int num_blocks, int slots, int stages) {
  config.user_slots = slots;
  config.stages = stages;
  return shared_bytes(config, num_blocks) <= kMaxSharedBytes;
}

// How many matrices of a user and how many stages fit into shared memory beside each other; no
// slot where not even one matrix does.
void divide_shared_memory(BmmCudaConfig& config, int num_blocks, int wanted_slots) {
  config.user_slots = 0;
  while (config.user_slots < wanted_slots &&
         fits_shared(config, num_blocks, config.user_slots + 1, kLeastStages)) {
    ++config.user_slots;
  }
  config.stages = kLeastStages;
  while (config.stages < kMaxStages &&
         fits_shared(config, num_blocks, config.user_slots, config.stages + 1)) {
    ++config.stages;
  }
}

// Likewise blocks of the matrix; each goes with a stage of either consumer.
void divide_for_streaming(BmmCudaConfig& config, int num_blocks) {
  config.streams_user = true;
  config.user_slots = kLeastStages / kConsumers;
  config.stages = kLeastStages;
  while (config.user_slots < kMaxUserSlots &&
         fits_shared(config, num_blocks, config.user_slots + 1, config.stages)) {
    ++config.user_slots;
    const int stages = kConsumers * config.user_slots;
    if (stages <= kMaxStages && fits_shared(config, num_blocks, config.user_slots, stages)) {
      config.stages = stages;
    }
  }
}

// Clocks of the busiest CTA. Bytes a clock of a multiprocessor, of 132 at 1.755 GHz: 20 of the 4.8
// TB/s of an H200's memory, 28 of some 6.5 TB/s of its L2.
double estimate_clocks(const BmmCudaConfig& config, const BmmParams& p, int num_sms,
                       std::int64_t column_tiles) {
  constexpr double kMemoryBytes = 20;
  constexpr double kL2Bytes = 28;
  const std::int64_t num_tiles_p = ceil_div(p.p, config.tile_p);
  const std::int64_t matrix_bytes = user_bytes(config.tile_p, blocks_of(p.r));
  const bool has_pairs = column_tiles >= 2 * std::int64_t{p.num_users};
  const double of_matrix =  // read for each tile
      config.streams_user ? static_cast<double>(matrix_bytes) / (has_pairs ? kConsumers : 1) : 0;
  const double loaded = 2.0 * kTileColumns * p.r;
  const double stored = 2.0 * kTileColumns * config.tile_p;
  // A step of 16 multiplies 2 columns of P a clock, or reads 128 bytes a clock: 32 of each row.
  const double of_step =
      std::max(config.tile_p / 2.0, 2 * kTileColumns * 32.0 / 128 + config.tile_p * 32.0 / 128);
  const double of_tile = std::max(
      {of_step * static_cast<double>(ceil_div(p.r, 16)), (loaded + of_matrix + stored) / kL2Bytes,
       (loaded / static_cast<double>(num_tiles_p) + stored) / kMemoryBytes});
  const std::int64_t tiles = ceil_div(column_tiles * num_tiles_p, num_sms);
  if (config.streams_user) return of_tile * static_cast<double>(tiles);
  // The first matrix is waited for; so is each of the next where none is loaded ahead.
  const std::int64_t matrices =
      config.user_slots > 1 ? 1 : std::min(tiles, ceil_div(p.num_users * num_tiles_p, num_sms) + 1);
  return of_tile * static_cast<double>(tiles) +
         static_cast<double>(matrices * matrix_bytes) / kL2Bytes;
}

// The widest tile of P with which every multiprocessor has a tile, unless a narrower one, or one
// for which the user's matrix is streamed, is faster by more than the estimate is worth: a wider
// one reads b_cand less often.
BmmCudaConfig select_tile(const BmmCudaConfig& base, const BmmParams& p, int num_sms) {
  constexpr double kClearlyFaster = 0.95;
  const int num_blocks = blocks_of(p.r);
  const std::int64_t column_tiles = ceil_div(std::int64_t{p.num_candidates} * p.n, kTileColumns);
  // Matrices that fill little of shared memory change often: several are loaded ahead.
  const int wanted_slots = p.num_users == 1 ? 1 : 4;
  BmmCudaConfig best = base;
  double best_clocks = std::numeric_limits<double>::infinity();
  const auto consider = [&](const BmmCudaConfig& tried) {
    const double clocks = estimate_clocks(tried, p, num_sms, column_tiles);
    if (best.user_slots > 0 && clocks > kClearlyFaster * best_clocks) return;
    best = tried;
    best_clocks = clocks;
  };
  for (const int tile_p : {256, 192, 128, 64}) {
    const bool is_narrowest = tile_p == 64;
    const bool is_too_wide = !is_narrowest && ceil_div(p.p, tile_p - 64) == ceil_div(p.p, tile_p);
    const bool fills_device = column_tiles * ceil_div(p.p, tile_p) >= num_sms;
    if (is_too_wide || (!fills_device && !is_narrowest)) continue;
    BmmCudaConfig tried = base;
    tried.tile_p = tile_p;
    divide_shared_memory(tried, num_blocks, wanted_slots);
    if (tried.user_slots > 0) consider(tried);
    if (tried.user_slots < 2 && base.feed == BmmFeed::kTma) {
      divide_for_streaming(tried, num_blocks);
      consider(tried);
    }
  }
  return best;
}

std::optional<BmmCudaConfig> select_sm90(const BmmParams& p, const DeviceLimits& limits) {
  if (limits.compute_capability != 90 || size_of(p.dtype) != 2) return std::nullopt;
  // The copy engine reads a_user, so that strides of 0 are none for it.
  const auto a_inner = aligned_inner({p.a_user, p.stride_a_u, p.stride_a_r, p.stride_a_p}, false);
  // A stride that no column but the first has does not matter.
  const bool is_single = p.n == 1;
  const auto b_inner = aligned_inner(
      {p.b_cand, p.stride_b_b, p.stride_b_r, is_single ? p.stride_b_b : p.stride_b_n}, true);
  const bool has_vectors = p.n % 8 == 0 || (is_single && p.p % 8 == 0 && b_inner == BmmInner::kSum);
  const bool fits = a_inner && b_inner && has_vectors && p.r > 0 && p.num_users > 0 &&
                    reinterpret_cast<std::uintptr_t>(p.out) % 16 == 0;
  if (!fits) return std::nullopt;
  const BmmCudaConfig config = select_tile({.kernel = BmmKernel::kSm90,
                                            .a_inner = *a_inner,
                                            .b_inner = *b_inner,
                                            .feed = select_feed(p, *b_inner),
                                            .store = select_store(p)},
                                           p, limits.num_sms);
  if (config.user_slots == 0) return std::nullopt;
  // Its CTAs share out the columns by numbers of 32 bits.
  const std::int64_t columns = std::int64_t{p.num_candidates} * p.n * ceil_div(p.p, config.tile_p);
  if (columns > std::numeric_limits<std::int32_t>::max()) return std::nullopt;
  return config;
}

const char* name_of(BmmStore store) {
  switch (store) {
    case BmmStore::kTma:
      return "tma";
    case BmmStore::kVectors:
      return "vectors";
    case BmmStore::kAlongP:
      return "along_p";
  }
  return "?";
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
       << ",store=" << name_of(config.store) << (config.streams_user ? ",blocks=" : ",users=")
       << config.user_slots << ",stages=" << config.stages << ">";
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
