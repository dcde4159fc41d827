// SPDX-License-Identifier: Apache-2.0
// The arguments of ikbo::target_attention and target_attention.packed, which the two parts of
// ikbo::self_target_attention have too, and their checks, shared by the CPU kernel and the
// composite.
#pragma once

#include <optional>

#include "torch_ops/checks.h"

namespace ikbo::ops {

inline const std::optional<Tensor> kNoTensor;

// What the rows of q are.
enum class Queries : std::int8_t {
  kCandidates,
  // The history itself: B is U, cand_to_user counts up, Q is S, and rows at or past the user's
  // length have no key. The composite alone knows these two.
  kHistory,
  kCausalHistory,  // row i has the keys up to i
};

struct AttentionArgs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& cand_to_user;
  const std::optional<Tensor>& user_lengths;
  const std::optional<Tensor>& cand_lengths;
  const std::optional<Tensor>& user_mask;
  const std::optional<double>& scale;
  // Present: k and v are packed, [T, H_kv, D], and neither lengths of users nor a mask are.
  const std::optional<Tensor>& user_offsets = kNoTensor;
  Queries queries = Queries::kCandidates;
  // For the texts of errors.
  const char* op = "target_attention";
  const char* q_name = "q";

  bool is_packed() const { return user_offsets.has_value(); }
  int64_t num_users() const { return is_packed() ? user_offsets->size(0) - 1 : k.size(0); }
  int64_t num_kv_heads() const { return k.size(is_packed() ? 1 : 2); }
};

struct AttentionGrads {
  const Tensor& out;  // of the gradients that came in
  const Tensor& lse;
};

// Devices, dtypes, ranks and shapes; index values, lengths and offsets are the kernel's.
void check_attention(const AttentionArgs& args);

// Keys of the longest history. Throws, naming value and place, unless the offsets begin with 0,
// never decrease and end within k.
int64_t checked_longest_history(const Tensor& user_offsets, int64_t num_rows);

}  // namespace ikbo::ops
