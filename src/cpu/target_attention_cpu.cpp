// SPDX-License-Identifier: Apache-2.0
// The host side of target attention on the CPU: configuration, plan, and the loop over tasks.
#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <tuple>
#include <utility>

#include "cpu/target_attention_kernels.h"
#include "ikbo/target_attention.h"

namespace ikbo {
namespace {

std::int32_t heads_per_kv_head(const TargetAttentionParams& params) {
  return params.num_heads / params.num_kv_heads;
}

// Rows of a user's history that may count.
std::int32_t history_length(const TargetAttentionParams& params, std::int32_t user) {
  if (params.user_offsets != nullptr) {
    return params.user_offsets[user + 1] - params.user_offsets[user];
  }
  return params.user_lengths == nullptr ? params.num_keys : params.user_lengths[user];
}

const cpu::TargetAttentionKernels& kernels_of(CpuIsa isa, DType dtype) {
  switch (isa) {
    case CpuIsa::kX86_64_v4:
      return cpu::x86_64_v4::target_attention_kernels(dtype);
    case CpuIsa::kX86_64_v3:
      return cpu::x86_64_v3::target_attention_kernels(dtype);
    case CpuIsa::kX86_64:
      return cpu::x86_64::target_attention_kernels(dtype);
  }
  IKBO_UNREACHABLE("CpuIsa");
}

struct AlignedDelete {
  void operator()(void* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};
using Scratch = std::unique_ptr<void, AlignedDelete>;

Scratch make_scratch(std::int64_t bytes) {
  return Scratch(::operator new(static_cast<std::size_t>(bytes), std::align_val_t{64}));
}

}  // namespace

CpuIsa native_cpu_isa() {
  if (__builtin_cpu_supports("x86-64-v4")) {
    return CpuIsa::kX86_64_v4;
  }
  return __builtin_cpu_supports("x86-64-v3") ? CpuIsa::kX86_64_v3 : CpuIsa::kX86_64;
}

TargetAttentionConfig select_target_attention_config(const TargetAttentionParams& params) {
  // A block's K^T and V take 64 KB each in fp32: together half of a 256 KB second-level cache.
  constexpr std::int32_t kBlockElements = 16384;
  // With fewer tasks than this, threads would wait for the last ones.
  constexpr std::int64_t kMinTasks = 16;
  constexpr std::int32_t kMinRowTile = 12;
  const std::int32_t elements =
      params.dtype == DType::kFloat64 ? kBlockElements / 2 : kBlockElements;
  const std::int32_t keys = elements / std::max(params.head_dim, 1) / 64 * 64;
  const std::int64_t rows =
      std::int64_t{params.num_candidates} * params.num_queries * params.num_heads;
  std::int32_t row_tile = cpu::kMaxRowTile;
  while (row_tile > kMinRowTile && rows < row_tile * kMinTasks) {
    row_tile /= 2;
  }
  return {.row_tile = row_tile, .key_block = std::clamp(keys, 64, 256)};
}

std::string to_string(const TargetAttentionConfig& config) {
  return "cpu_rows" + std::to_string(config.row_tile) + "_keys" + std::to_string(config.key_block);
}

TargetAttentionPlan::TargetAttentionPlan(const TargetAttentionParams& params,
                                         const TargetAttentionConfig& config)
    : TargetAttentionPlan(params, config, config.row_tile) {}

TargetAttentionPlan TargetAttentionPlan::for_backward(const TargetAttentionParams& params,
                                                      const TargetAttentionConfig& config) {
  return TargetAttentionPlan(params, config, std::numeric_limits<std::int32_t>::max());
}

TargetAttentionPlan::TargetAttentionPlan(const TargetAttentionParams& params,
                                         const TargetAttentionConfig& config, std::int32_t row_tile)
    : config_(config) {
  group_candidates(params);
  if (params.user_mask != nullptr) {
    list_keys(params);
  }
  count_keys(params);
  make_tasks(params, row_tile);
}

// A counting sort of the candidates by user.
void TargetAttentionPlan::group_candidates(const TargetAttentionParams& params) {
  cand_offsets_.assign(static_cast<std::size_t>(params.num_users) + 1, 0);
  for (std::int32_t b = 0; b < params.num_candidates; ++b) {
    ++cand_offsets_[params.cand_to_user[b] + 1];
  }
  std::partial_sum(cand_offsets_.begin(), cand_offsets_.end(), cand_offsets_.begin());
  std::vector<std::int32_t> next(cand_offsets_.begin(), cand_offsets_.end() - 1);
  cands_.resize(params.num_candidates);
  for (std::int32_t b = 0; b < params.num_candidates; ++b) {
    cands_[next[params.cand_to_user[b]]++] = b;
  }
}

// The keys that the mask lets through, user by user.
void TargetAttentionPlan::list_keys(const TargetAttentionParams& params) {
  key_offsets_.assign(static_cast<std::size_t>(params.num_users) + 1, 0);
  for (std::int32_t u = 0; u < params.num_users; ++u) {
    const bool* mask = params.user_mask + std::int64_t{u} * params.num_keys;
    const std::int32_t length = history_length(params, u);
    for (std::int32_t s = 0; s < length; ++s) {
      if (mask[s]) {
        key_rows_.push_back(s);
      }
    }
    key_offsets_[u + 1] = static_cast<std::int64_t>(key_rows_.size());
  }
}

// How many of its user's keys count for each candidate; sorts a user's candidates by it.
void TargetAttentionPlan::count_keys(const TargetAttentionParams& params) {
  key_counts_.resize(params.num_candidates);
  std::vector<std::pair<std::int32_t, std::int32_t>> order;
  for (std::int32_t u = 0; u < params.num_users; ++u) {
    const std::int32_t begin = cand_offsets_[u];
    const std::int32_t end = cand_offsets_[u + 1];
    const std::int32_t* keys = params.user_mask ? key_rows_.data() + key_offsets_[u] : nullptr;
    const std::int32_t all =
        params.user_mask ? key_offsets_[u + 1] - key_offsets_[u] : history_length(params, u);
    if (params.cand_lengths == nullptr) {
      std::fill(key_counts_.begin() + begin, key_counts_.begin() + end, all);
      continue;
    }
    order.clear();
    for (std::int32_t i = begin; i < end; ++i) {
      const std::int32_t length = params.cand_lengths[cands_[i]];
      const std::int32_t count =
          keys ? std::lower_bound(keys, keys + all, length) - keys : std::min(all, length);
      order.emplace_back(count, cands_[i]);
    }
    std::sort(order.begin(), order.end());
    for (std::int32_t i = begin; i < end; ++i) {
      std::tie(key_counts_[i], cands_[i]) = order[i - begin];
    }
  }
}

void TargetAttentionPlan::make_tasks(const TargetAttentionParams& params, std::int32_t row_tile) {
  const std::int64_t rows_per_cand = std::int64_t{params.num_queries} * heads_per_kv_head(params);
  for (std::int32_t u = 0; u < params.num_users; ++u) {
    const std::int64_t rows = (cand_offsets_[u + 1] - cand_offsets_[u]) * rows_per_cand;
    for (std::int32_t kv_head = 0; kv_head < params.num_kv_heads; ++kv_head) {
      for (std::int64_t row = 0; row < rows; row += row_tile) {
        tasks_.push_back(
            {.user = u,
             .kv_head = kv_head,
             .row_begin = static_cast<std::int32_t>(row),
             .row_end = static_cast<std::int32_t>(std::min<std::int64_t>(rows, row + row_tile)),
             .cands = cands_.data() + cand_offsets_[u],
             .key_counts = key_counts_.data() + cand_offsets_[u],
             .key_rows = params.user_mask ? key_rows_.data() + key_offsets_[u] : nullptr});
      }
    }
  }
  // Longest first: threads take tasks one by one and should end together. Equal ones stay in the
  // order of users, whose rows lie side by side.
  const auto cost = [rows_per_cand](const TargetAttentionTask& task) {
    const std::int64_t last_cand = (task.row_end - 1) / rows_per_cand;
    return std::int64_t{task.row_end - task.row_begin} * task.key_counts[last_cand];
  };
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
}

void run_target_attention(const TargetAttentionParams& params, const TargetAttentionPlan& plan,
                          CpuIsa isa, std::atomic<std::int64_t>& next_task) {
  const cpu::TargetAttentionKernels& kernels = kernels_of(isa, params.dtype);
  const Scratch scratch = make_scratch(kernels.forward_scratch_bytes(params, plan.config()));
  const std::int64_t num_tasks = static_cast<std::int64_t>(plan.tasks().size());
  for (std::int64_t i = next_task++; i < num_tasks; i = next_task++) {
    kernels.forward(params, plan.tasks()[i], plan.config(), scratch.get());
  }
}

void run_target_attention_backward(const TargetAttentionGradParams& params,
                                   const TargetAttentionPlan& plan, CpuIsa isa,
                                   std::atomic<std::int64_t>& next_task) {
  const TargetAttentionParams& forward = params.forward;
  const cpu::TargetAttentionKernels& kernels = kernels_of(isa, forward.dtype);
  const Scratch scratch = make_scratch(kernels.backward_scratch_bytes(forward, plan.config()));
  const std::int64_t num_tasks = static_cast<std::int64_t>(plan.tasks().size());
  for (std::int64_t i = next_task++; i < num_tasks; i = next_task++) {
    kernels.backward(params, plan.tasks()[i], plan.config(), scratch.get());
  }
}

}  // namespace ikbo
