// SPDX-License-Identifier: Apache-2.0
// Launches of target_attention_generic for one element type.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/host/launch.h"
#include "kernels/target_attention/target_attention_generic_launch.h"
#include "kernels/target_attention/target_attention_generic_merge.cuh"
#include "kernels/target_attention/target_attention_mma.cuh"
#include "kernels/target_attention/target_attention_simt.cuh"

namespace ikbo::target_attention_impl {

template <typename Engine>
void launch_engine(const GenericLaunch& launch) {
  constexpr std::int64_t kCtasPerSm = 8;  // as many as have a place, and then some
  GenericArgs args = launch.args;
  constexpr int kVectorBytes = Engine::kVector * static_cast<int>(sizeof(typename Engine::Word));
  args.stores_vectors = args.head_dim % Engine::kVector == 0 &&
                        reinterpret_cast<std::uintptr_t>(args.out) % kVectorBytes == 0;
  const std::int64_t grid =
      std::min(launch.max_tiles * args.num_splits, launch.num_sms * kCtasPerSm);
  host::launch("ikbo::target_attention", target_attention_generic_kernel<Engine>,
               {.grid = dim3(static_cast<unsigned>(grid)),
                .threads = kGenericThreads,
                .shared_bytes = static_cast<int>(sizeof(typename GenericTile<Engine>::Shared))},
               launch.stream, args);
  if (args.num_splits == 1) return;
  host::launch(
      "ikbo::target_attention (merge)",
      target_attention_generic_merge_kernel<typename Engine::Element>,
      {.grid = dim3(static_cast<unsigned>(launch.max_tiles), kGenericTileRows / kMergeRows),
       .threads = kMergeThreads},
      launch.stream, args, Engine::kHeadDim);
}

template <typename Element, int kHeadDim>
using EngineOf =
    std::conditional_t<sizeof(Element) == 2, MmaEngine<Element, kHeadDim>, SimtEngine<kHeadDim>>;

template <typename Element>
void launch_generic_of(const GenericLaunch& launch) {
  switch (launch.head_dim) {
    case 32:
      return launch_engine<EngineOf<Element, 32>>(launch);
    case 64:
      return launch_engine<EngineOf<Element, 64>>(launch);
    case 96:
      return launch_engine<EngineOf<Element, 96>>(launch);
    case 128:
      return launch_engine<EngineOf<Element, 128>>(launch);
    case 192:
      return launch_engine<EngineOf<Element, 192>>(launch);
    case 256:
      return launch_engine<EngineOf<Element, 256>>(launch);
    default:
      detail::throw_error(__FILE__, __LINE__,
                          "ikbo::target_attention: no target_attention_generic kernel with "
                          "head_dim ",
                          launch.head_dim, "; there are 32, 64, 96, 128, 192, 256");
  }
}

}  // namespace ikbo::target_attention_impl
