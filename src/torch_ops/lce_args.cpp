// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/lce_args.h"

#include <algorithm>
#include <iterator>

namespace ikbo::ops {
namespace {

constexpr const char* kOp = "lce";

std::vector<Named> named_parts(const LceArgs& args) {
  if (args.form == LceForm::kOne) {
    return {{"e_cand", args.e_cand.front()}};
  }
  STD_TORCH_CHECK(!args.e_cand.empty(),
                  "ikbo::lce: e_cand must hold at least one tensor [B, K_i, N]; got an empty list");
  std::vector<Named> parts;
  parts.reserve(args.e_cand.size());
  for (std::size_t i = 0; i < args.e_cand.size(); ++i) {
    parts.push_back({"e_cand[" + std::to_string(i) + "]", args.e_cand[i]});
  }
  return parts;
}

void check_devices_and_dtypes(const LceArgs& args, const std::vector<Named>& parts) {
  const bool is_packed = args.form == LceForm::kPrepacked;
  std::vector<Named> floats{{"e_user", args.e_user}};
  std::copy(parts.begin(), parts.end(), std::back_inserter(floats));
  floats.push_back({"w_user", args.w_user});
  if (!is_packed) {
    floats.push_back({"w_cand", args.w_cand});
  }
  if (args.bias.has_value()) {
    floats.push_back({"bias", *args.bias});
  }
  std::vector<Named> all = floats;
  if (is_packed) {
    all.push_back({"w_cand_packed", args.w_cand});
  }
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  all.push_back(cand_to_user);
  check_devices(kOp, all);
  check_float_dtypes(kOp, floats);
  check_dtype(kOp, cand_to_user, ScalarType::Int);
}

void check_lce(const LceArgs& args) {
  const std::vector<Named> parts = named_parts(args);
  check_devices_and_dtypes(args, parts);
  const bool is_packed = args.form == LceForm::kPrepacked;
  const Named e_user{"e_user", args.e_user};
  const Named w_user{"w_user", args.w_user};
  const Named w_cand{"w_cand", args.w_cand};
  const Named cand_to_user{"cand_to_user", args.cand_to_user};
  check_rank(kOp, e_user, 3, "[U, K_user, N]");
  for (const Named& part : parts) {
    check_rank(kOp, part, 3, args.form == LceForm::kOne ? "[B, K_cand, N]" : "[B, K_i, N]");
  }
  check_rank(kOp, w_user, 2, "[M, K_user]");
  if (!is_packed) {
    check_rank(kOp, w_cand, 2, "[M, K_cand]");
  }
  check_rank(kOp, cand_to_user, 1, "[B]");
  const Dim m{"M", (is_packed ? args.w_user : args.w_cand).size(0)};
  const Dim b{"B", parts.front().tensor.size(0)};
  const Dim n{"N", parts.front().tensor.size(2)};
  Dim k_cand{args.form == LceForm::kOne ? "K_cand" : "sum of K_i", 0};
  for (const Named& part : parts) {
    check_shape(kOp, part, {b, {"K_i", part.tensor.size(1)}, n});
    k_cand.size += part.tensor.size(1);
  }
  check_shape(kOp, e_user, {{"U", args.e_user.size(0)}, {"K_user", args.e_user.size(1)}, n});
  check_shape(kOp, w_user, {m, {"K_user", args.e_user.size(1)}});
  if (!is_packed) {
    check_shape(kOp, w_cand, {m, k_cand});
  }
  check_shape(kOp, cand_to_user, {b});
  if (args.bias.has_value()) {
    const Named bias{"bias", *args.bias};
    check_rank(kOp, bias, 1, "[M]");
    check_shape(kOp, bias, {m});
  }
}

PackedWeight weight_of(const LceArgs& args) {
  if (args.form != LceForm::kPrepacked) {
    PackedWeight plain;
    plain.matrix = args.w_cand;
    return plain;
  }
  std::vector<int64_t> k_cand;
  k_cand.reserve(args.e_cand.size());
  for (const Tensor& part : args.e_cand) {
    k_cand.push_back(part.size(1));
  }
  return open_packed(
      kOp, args.w_cand,
      packed_format(args.e_user.device(), args.e_user.scalar_type(), args.w_user.size(0), k_cand));
}

}  // namespace

LceCall checked_lce(const LceArgs& args) {
  check_lce(args);
  return {args.e_user, args.e_cand, args.w_user, weight_of(args), args.bias, args.cand_to_user};
}

}  // namespace ikbo::ops
