// SPDX-License-Identifier: Apache-2.0
// Which LCE kernel runs for which sizes.
#include <algorithm>
#include <cstdint>
#include <sstream>

#include "ikbo/lce.h"
#include "kernels/lce/lce_generic.h"
#include "kernels/lce/lce_layout.h"

namespace ikbo {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The copy engine needs 16-byte alignment of the base address and of every stride but the
// innermost.
bool is_tma_tensor(const void* data, std::int64_t stride_outer, std::int64_t stride_k,
                   std::int64_t stride_n) {
  return stride_n == 1 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         (stride_outer * 2) % 16 == 0 && (stride_k * 2) % 16 == 0 && stride_k > 0 &&
         stride_outer > 0;
}

// The candidates per user up to which multiplying the user's rows again costs less than writing and
// reading their product.
constexpr double kMaxRatioOfDualK = 1.25;

// Two stages that find a place side by side take the longer one's time, not both's, and one
// dependent launch more. They are worth it from this many blocks of k in the shorter one: a launch
// takes some 3000 clocks, a block some 250, the 12 to 22 KB that one multiprocessor loads.
constexpr int kMinBlocksAtOnce = 12;

// CTAs of both stages where each warpgroup has one tile: in the user stage there is one warpgroup a
// CTA, in the candidate stage there are two.
std::int64_t num_ctas(const LceParams& params, int tile_m) {
  const std::int64_t slices = ceil_div(params.n, lce_impl::kSliceN);
  const std::int64_t pairs = slices % 2 == 0 ? params.num_candidates * (slices / 2)
                                             : ceil_div(params.num_candidates, 2) * slices;
  return (params.num_users * slices + pairs) * ceil_div(params.m, tile_m);
}

// The narrowest tiles with which every CTA has a multiprocessor of its own, where there are such
// tiles below `config`'s: what a CTA loads and multiplies then takes the least time. A packed
// weight has the tiles that it was packed for.
void narrow_tiles(LceConfig& config, const LceParams& params, int num_sms) {
  if (params.w_user_packed != nullptr || params.w_cand_packed != nullptr) return;
  for (const int tile_m : lce_impl::kTileWidths) {
    if (tile_m >= config.tile_m) return;
    if (num_ctas(params, tile_m) <= num_sms) {
      config.tile_m = tile_m;
      config.num_tiles_m = static_cast<int>(ceil_div(params.m, tile_m));
      return;
    }
  }
}

}  // namespace

namespace lce_impl {

LceSplit split_lce(int batch, int num_slices, int num_tiles_m, int consumers, int num_sms) {
  LceSplit split;
  split.slices_per_cta = num_slices % consumers == 0 ? consumers : 1;
  const std::int64_t step = consumers / split.slices_per_cta;
  const std::int64_t classes = std::int64_t{num_slices} / split.slices_per_cta * num_tiles_m;
  constexpr int kMaxItemsPerCta = 16;
  std::int64_t fewest_rounds = INT64_MAX;
  for (int items_per_cta = 1; items_per_cta <= kMaxItemsPerCta; ++items_per_cta) {
    const std::int64_t wanted = std::int64_t{num_sms} * items_per_cta / classes;
    const std::int64_t chunks = std::clamp<std::int64_t>(wanted, 1, ceil_div(batch, step));
    const std::int64_t tiles = ceil_div(ceil_div(batch, chunks), step);  // of an item
    const std::int64_t items = ceil_div(batch, tiles * step) * classes;
    const std::int64_t rounds = ceil_div(items, num_sms) * tiles;
    if (rounds < fewest_rounds) {
      fewest_rounds = rounds;
      split.chunk_size = static_cast<int>(tiles * step);
      split.num_items = static_cast<int>(items);
    }
  }
  return split;
}

std::span<const LcePart> candidate_parts(const LceParams& params, LcePart& one) {
  if (params.num_cand_parts > 0) {
    return {params.cand_parts, static_cast<std::size_t>(params.num_cand_parts)};
  }
  one = {params.e_cand, params.k_cand, params.stride_e_cand_b, params.stride_e_cand_k,
         params.stride_e_cand_n};
  return {&one, 1};
}

int padded_k_cand(const LceParams& params) {
  LcePart one;
  int k = 0;
  for (const LcePart& part : candidate_parts(params, one)) k += lce_padded_k(part.k);
  return k;
}

}  // namespace lce_impl

std::string to_string(const LceConfig& config) {
  if (config.kernel == LceKernel::kSimt) return "lce_simt";
  std::ostringstream text;
  if (config.kernel == LceKernel::kMma) {
    text << "lce_mma<tile=" << config.tile_m << ",user_tile=" << config.user_tile_m << ">";
    return text.str();
  }
  text << "lce_sm90<tile_m=" << config.tile_m;
  if (config.dual_k) {
    text << ",dual_k>";
  } else {
    text << ",user_units=" << config.user_units_per_cta << ">";
  }
  return text.str();
}

LceConfig select_lce_pack_config(int m, DType dtype, const DeviceLimits& limits) {
  const bool is_16_bit = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (limits.compute_capability != 90 || !is_16_bit) return {};
  // The width with the least padding; among equals the widest, since it reads E the fewest times.
  LceConfig config{.kernel = LceKernel::kSm90};
  std::int64_t least_rows = INT64_MAX;
  for (const int tile_m : lce_impl::kTileWidths) {
    const std::int64_t tiles = ceil_div(m, tile_m);
    if (tiles * tile_m <= least_rows) {
      least_rows = tiles * tile_m;
      config.tile_m = tile_m;
      config.num_tiles_m = static_cast<int>(tiles);
    }
  }
  return config;
}

LceConfig select_lce_config(const LceParams& params, const DeviceLimits& limits) {
  LceConfig config = select_lce_pack_config(params.m, params.dtype, limits);
  LcePart one;
  const std::span<const LcePart> parts = lce_impl::candidate_parts(params, one);
  const bool has_tma =
      config.kernel == LceKernel::kSm90 && params.n % 8 == 0 && params.m > 0 && params.n > 0 &&
      params.k_user > 0 && params.k_cand > 0 &&
      reinterpret_cast<std::uintptr_t>(params.out) % 16 == 0 &&
      is_tma_tensor(params.e_user, params.stride_e_user_u, params.stride_e_user_k,
                    params.stride_e_user_n) &&
      parts.size() <= lce_max_parts &&
      std::all_of(parts.begin(), parts.end(), [](const LcePart& part) {
        return part.k == 0 || is_tma_tensor(part.e, part.stride_b, part.stride_k, part.stride_n);
      });
  if (!has_tma) return lce_impl::select_generic_config(params, limits);

  narrow_tiles(config, params, limits.num_sms);
  const bool runs_at_once =
      num_ctas(params, config.tile_m) <= limits.num_sms &&
      std::min(params.k_user, params.k_cand) >= kMinBlocksAtOnce * lce_impl::kBlockK;
  config.dual_k = parts.size() == 1 && !runs_at_once &&
                  params.num_candidates <= kMaxRatioOfDualK * params.num_users;
  // Two units a CTA read the weight half as often, once that still gives every SM a tile.
  const std::int64_t user_units =
      params.num_users * ceil_div(params.n, lce_impl::kSliceN) * config.num_tiles_m;
  config.user_units_per_cta = user_units >= 2 * limits.num_sms ? 2 : 1;
  return config;
}

std::size_t lce_packed_bytes(int k, const LceConfig& config) {
  if (config.kernel != LceKernel::kSm90) return 0;
  return static_cast<std::size_t>(config.num_tiles_m) * ceil_div(k, lce_impl::kBlockK) *
         config.tile_m * lce_impl::kBlockK * 2;
}

int lce_padded_k(int k) {
  return static_cast<int>(ceil_div(k, lce_impl::kBlockK) * lce_impl::kBlockK);
}

std::size_t lce_workspace_bytes(const LceParams& params, const LceConfig& config) {
  return lce_impl::make_workspace_layout(params, config).total_bytes;
}

}  // namespace ikbo
