// SPDX-License-Identifier: Apache-2.0
#include "ikbo/runtime/batch.h"

#include <cstring>
#include <utility>

#include "ikbo/error.h"
#include "runtime/checks.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

// Writes a request's index into `out`, moved to where its users stand in the run.
void append_index(const Request& request, const TensorView& index, std::int64_t first_user,
                  std::byte* out) {
  for (std::int64_t b = 0; b < request.num_candidates; ++b) {
    std::int32_t user = 0;
    if (!index.is_absent()) {
      std::memcpy(&user, static_cast<const std::byte*>(index.data) + b * sizeof(user),
                  sizeof(user));
    }
    user += static_cast<std::int32_t>(first_user);
    std::memcpy(out + b * sizeof(user), &user, sizeof(user));
  }
}

Tensor concatenate(const TensorSpec& spec, std::size_t input,
                   const std::vector<const Request*>& requests, const Batch& run) {
  const std::int64_t rows = num_rows(spec.role, run.inputs.num_users, run.inputs.num_candidates);
  const OwnedTensor joined = allocate_rows(spec, rows);
  std::byte* out = joined.data;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Request& request = *requests[r];
    const TensorView& part = request.tensors[input];
    const std::size_t bytes =
        static_cast<std::size_t>(num_rows(spec.role, request.num_users, request.num_candidates)) *
        spec.row_bytes();
    if (spec.role == Role::kIndex) {
      append_index(request, part, run.user_offsets[r], out);
    } else if (bytes > 0) {
      std::memcpy(out, part.data, bytes);
    }
    out += bytes;
  }
  return joined.tensor;
}

Tensor rows_of(const TensorSpec& spec, const Tensor& whole, std::int64_t begin, std::int64_t end) {
  Tensor part = whole;
  part.shape[0] = end - begin;
  part.bytes = static_cast<std::size_t>(end - begin) * spec.row_bytes();
  part.data = static_cast<const std::byte*>(whole.data) +
              static_cast<std::size_t>(begin) * spec.row_bytes();
  return part;
}

}  // namespace

void check_request(const Manifest& manifest, const Request& request) {
  check_inputs(manifest, request.num_users, request.num_candidates, request.tensors,
               AbsentIndex::kForOneUser);
}

Batch batch(const Manifest& manifest, const std::vector<const Request*>& requests) {
  IKBO_CHECK(!requests.empty(), "batch: must be given at least one request; got none");
  Batch run;
  run.user_offsets.push_back(0);
  run.candidate_offsets.push_back(0);
  for (const Request* request : requests) {
    run.user_offsets.push_back(run.user_offsets.back() + request->num_users);
    run.candidate_offsets.push_back(run.candidate_offsets.back() + request->num_candidates);
  }
  run.inputs.num_users = run.user_offsets.back();
  run.inputs.num_candidates = run.candidate_offsets.back();
  IKBO_CHECK(run.inputs.num_users <= manifest.max_users, "model ", manifest.model_name,
             ": the users of one run must be at most ", manifest.max_users, "; got ",
             run.inputs.num_users, " in ", requests.size(), " requests");
  IKBO_CHECK(run.inputs.num_candidates <= manifest.max_candidates, "model ", manifest.model_name,
             ": the candidates of one run must be at most ", manifest.max_candidates, "; got ",
             run.inputs.num_candidates, " in ", requests.size(), " requests");

  const bool passes_through = requests.size() == 1;
  if (passes_through) {
    run.storage.push_back(requests.front()->owner);
  }
  for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
    const TensorView& first = requests.front()->tensors[i];
    if (passes_through && !first.is_absent()) {
      run.inputs.tensors.push_back(first);
      continue;
    }
    const Tensor joined = concatenate(manifest.inputs[i], i, requests, run);
    run.storage.push_back(joined.owner);
    run.inputs.tensors.push_back(joined.view());
  }
  return run;
}

std::vector<Response> split(const Manifest& manifest, const Batch& batch,
                            const std::vector<Tensor>& outputs) {
  IKBO_CHECK(outputs.size() == manifest.outputs.size(), "model ", manifest.model_name,
             ": split must be given ", manifest.outputs.size(), " outputs; got ", outputs.size());
  std::vector<Response> responses(batch.user_offsets.size() - 1);
  for (std::size_t r = 0; r < responses.size(); ++r) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const TensorSpec& spec = manifest.outputs[i];
      const std::vector<std::int64_t>& offsets =
          spec.role == Role::kUser ? batch.user_offsets : batch.candidate_offsets;
      responses[r].outputs.push_back(rows_of(spec, outputs[i], offsets[r], offsets[r + 1]));
    }
  }
  return responses;
}

}  // namespace ikbo::runtime
