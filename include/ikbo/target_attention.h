// SPDX-License-Identifier: Apache-2.0
// Target attention on the CPU: softmax attention of candidate queries over their user's keys and
// values, which are read by index and never replicated.
//
//   out[b, i, h, :] = softmax_s(scale * q[b, i, h, :] . k[u, s, g, :]) v[u, s, g, :]
//   with u = cand_to_user[b], g = h / (H / H_kv), over the keys s that count for candidate b:
//   s < user_lengths[u], s < cand_lengths[b] and user_mask[u, s], each where given.
//
// Histories are rows of one length S, or packed: those of user u are then the rows user_offsets[u]
// to user_offsets[u + 1] - 1 of k and v, and s counts from the first of them.
//
// A call is: fill TargetAttentionParams, select a config, build a plan (rows grouped by user), and
// let any number of threads run `run_target_attention` over the same task counter. A row is
// computed by the same operations in the same order whatever the other rows, the thread count and
// the tiling are: results are bitwise equal when candidates are permuted or users added.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "ikbo/types.h"

namespace ikbo {

struct TargetAttentionParams {
  // Sizes.
  std::int32_t num_users = 0;       // U
  std::int32_t num_candidates = 0;  // B
  std::int32_t num_queries = 0;     // Q, query rows per candidate
  std::int32_t num_keys = 0;        // S; packed: the longest history, on a GPU T
  std::int32_t num_heads = 0;       // H, a multiple of H_kv
  std::int32_t num_kv_heads = 0;    // H_kv
  std::int32_t head_dim = 0;        // D
  DType dtype = DType::kFloat32;    // of q, k, v, out: float16, bfloat16, float32 or float64
  double scale = 0.0;
  // Inputs.
  const void* q = nullptr;  // [B, Q, H, D]
  const void* k = nullptr;  // [U, S, H_kv, D]; packed: [T, H_kv, D]
  const void* v = nullptr;  // as k
  std::array<std::int64_t, 4> stride_q{};
  std::array<std::int64_t, 4> stride_k{};  // packed: the first is not read
  std::array<std::int64_t, 4> stride_v{};
  const std::int32_t* cand_to_user = nullptr;  // [B], in [0, U)
  // [U + 1], from 0 to T at most, never decreasing: histories are packed, and there are neither
  // lengths of users nor a mask. nullptr: they are not packed.
  const std::int32_t* user_offsets = nullptr;
  const std::int32_t* user_lengths = nullptr;  // [U], in [0, S]; may be nullptr
  const std::int32_t* cand_lengths = nullptr;  // [B], in [0, S], packed: >= 0; may be nullptr
  const bool* user_mask = nullptr;             // [U, S], true: the key counts; may be nullptr
  // Outputs, contiguous. The backward pass reads both.
  void* out = nullptr;  // [B, Q, H, D]
  void* lse = nullptr;  // [B, H, Q] float32 (float64 for float64), -inf for a row without a key
};

// Gradients of the operator; `forward` holds its inputs and its outputs.
struct TargetAttentionGradParams {
  TargetAttentionParams forward;
  const void* grad_out = nullptr;  // [B, Q, H, D], contiguous
  const void* grad_lse = nullptr;  // [B, H, Q], contiguous
  void* grad_q = nullptr;          // [B, Q, H, D], contiguous
  void* grad_k = nullptr;          // sizes of k, contiguous, zero-filled by the caller
  void* grad_v = nullptr;          // sizes of v, contiguous, zero-filled by the caller
};

// Instruction sets that the kernels are compiled for, named as GCC's -march spells them.
enum class CpuIsa : std::int8_t { kX86_64, kX86_64_v3, kX86_64_v4 };

// The widest of them that this machine runs.
CpuIsa native_cpu_isa();

struct TargetAttentionConfig {
  std::int32_t row_tile = 0;   // rows (candidate, query, head of a kv head) of one task
  std::int32_t key_block = 0;  // keys between two rescalings of the online softmax
};

// Reads sizes and dtype of the params alone. key_block depends on D and the dtype, so that a row's
// sums never depend on the batch.
TargetAttentionConfig select_target_attention_config(const TargetAttentionParams& params);

// "cpu_rows96_keys256". Without the instruction set, which is the machine's: a package may be built
// on another one.
std::string to_string(const TargetAttentionConfig& config);

// One unit of work: a range of rows of one user and kv head. Row r is head r % G of query
// (r / G) % Q of candidate cands[r / (Q * G)], where G = H / H_kv.
struct TargetAttentionTask {
  std::int32_t user = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_begin = 0;
  std::int32_t row_end = 0;
  const std::int32_t* cands = nullptr;       // this user's candidates, by ascending key count
  const std::int32_t* key_counts = nullptr;  // keys that count for each of them
  const std::int32_t* key_rows = nullptr;  // their positions in the history; nullptr: 0, 1, 2, ...
};

// The work of one call. Refers to the params' arrays only while it is built.
class TargetAttentionPlan {
 public:
  TargetAttentionPlan(const TargetAttentionParams& params, const TargetAttentionConfig& config);
  // Its tasks point into it.
  TargetAttentionPlan(const TargetAttentionPlan&) = delete;
  TargetAttentionPlan& operator=(const TargetAttentionPlan&) = delete;
  // Tasks of the backward pass own whole (user, kv head) pairs, whose key gradients they sum.
  static TargetAttentionPlan for_backward(const TargetAttentionParams& params,
                                          const TargetAttentionConfig& config);

  // Longest first.
  const std::vector<TargetAttentionTask>& tasks() const { return tasks_; }
  const TargetAttentionConfig& config() const { return config_; }

 private:
  TargetAttentionPlan(const TargetAttentionParams& params, const TargetAttentionConfig& config,
                      std::int32_t row_tile);
  void group_candidates(const TargetAttentionParams& params);
  void list_keys(const TargetAttentionParams& params);
  void count_keys(const TargetAttentionParams& params);
  void make_tasks(const TargetAttentionParams& params, std::int32_t row_tile);

  TargetAttentionConfig config_;
  std::vector<std::int32_t> cand_offsets_;  // [U + 1] into cands_
  std::vector<std::int32_t> cands_;         // [B], grouped by user
  std::vector<std::int32_t> key_counts_;    // [B], of cands_
  std::vector<std::int64_t> key_offsets_;   // [U + 1] into key_rows_; empty without a mask
  std::vector<std::int32_t> key_rows_;      // positions of the keys that count, user by user
  std::vector<TargetAttentionTask> tasks_;
};

// Runs tasks of the plan until `next_task` is past the last; for several threads at once.
void run_target_attention(const TargetAttentionParams& params, const TargetAttentionPlan& plan,
                          CpuIsa isa, std::atomic<std::int64_t>& next_task);
void run_target_attention_backward(const TargetAttentionGradParams& params,
                                   const TargetAttentionPlan& plan, CpuIsa isa,
                                   std::atomic<std::int64_t>& next_task);

}  // namespace ikbo
