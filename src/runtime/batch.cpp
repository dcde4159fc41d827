// SPDX-License-Identifier: Apache-2.0
#include "ikbo/runtime/batch.h"

#include <cstring>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "ikbo/error.h"
#include "runtime/checks.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

// Writes a request's index into `out`, moved to where its users stand in the run.
void append_index(const TensorView& index, const Placement& place, std::byte* out) {
  for (std::int64_t b = 0; b < place.num_candidates; ++b) {
    std::int32_t user = 0;
    if (!index.is_absent()) {
      std::memcpy(&user, static_cast<const std::byte*>(index.data) + b * sizeof(user),
                  sizeof(user));
    }
    user += static_cast<std::int32_t>(place.first_user);
    std::memcpy(out + b * sizeof(user), &user, sizeof(user));
  }
}

Tensor concatenate(const TensorSpec& spec, std::size_t input,
                   const std::vector<const Request*>& requests, const Batch& run) {
  const std::int64_t rows = num_rows(spec.role, run.inputs.num_users, run.inputs.num_candidates);
  const OwnedTensor joined = allocate_rows(spec, rows);
  std::byte* out = joined.data;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Placement& place = run.places[r];
    if (spec.role == Role::kUser && place.shares_user) {
      continue;
    }
    const TensorView& part = requests[r]->tensors[input];
    const std::size_t bytes =
        static_cast<std::size_t>(num_rows(spec.role, place.num_users, place.num_candidates)) *
        spec.row_bytes();
    if (spec.role == Role::kIndex) {
      append_index(part, place, out);
    } else if (bytes > 0) {
      std::memcpy(out, part.data, bytes);
    }
    out += bytes;
  }
  return joined.tensor;
}

// Places of the requests one behind the other, users that they share at their first place.
std::vector<Placement> place_all(const Manifest& manifest,
                                 const std::vector<const Request*>& requests) {
  std::vector<Placement> places;
  places.reserve(requests.size());
  // The first request of each different user, by key.
  std::unordered_multimap<std::string_view, std::size_t> known;
  std::int64_t num_users = 0;
  std::int64_t num_candidates = 0;
  for (const Request* request : requests) {
    Placement place{num_users, request->num_users, num_candidates, request->num_candidates};
    if (!request->user_key.empty()) {
      const auto [first, last] = known.equal_range(request->user_key);
      for (auto it = first; it != last && !place.shares_user; ++it) {
        if (have_same_user(manifest, *requests[it->second], *request)) {
          place.first_user = places[it->second].first_user;
          place.shares_user = true;
        }
      }
      if (!place.shares_user) {
        known.emplace(request->user_key, places.size());
      }
    }
    num_users += place.shares_user ? 0 : place.num_users;
    num_candidates += place.num_candidates;
    places.push_back(place);
  }
  return places;
}

// Of each user in the run, for the cache of user states; empty where nobody says.
std::vector<std::string> keys_of_users(const std::vector<const Request*>& requests,
                                       const Batch& run) {
  std::vector<std::string> keys(static_cast<std::size_t>(run.inputs.num_users));
  for (std::size_t r = 0; r < requests.size(); ++r) {
    if (!requests[r]->user_key.empty()) {
      keys[static_cast<std::size_t>(run.places[r].first_user)] = requests[r]->user_key;
    }
  }
  return keys;
}

Tensor rows_of(const TensorSpec& spec, const Tensor& whole, std::int64_t first,
               std::int64_t count) {
  Tensor part = whole;
  part.shape[0] = count;
  part.bytes = static_cast<std::size_t>(count) * spec.row_bytes();
  part.data = static_cast<const std::byte*>(whole.data) +
              static_cast<std::size_t>(first) * spec.row_bytes();
  return part;
}

}  // namespace

void check_request(const Manifest& manifest, const Request& request) {
  check_inputs(manifest, request.num_users, request.num_candidates, request.tensors,
               AbsentIndex::kForOneUser, Sizes::kAny);
}

bool have_same_user(const Manifest& manifest, const Request& a, const Request& b) {
  if (a.num_users != 1 || b.num_users != 1 || a.user_key.empty() || a.user_key != b.user_key) {
    return false;
  }
  for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
    const std::size_t bytes = a.tensors[i].bytes;
    if (manifest.inputs[i].role == Role::kUser && bytes > 0 &&
        std::memcmp(a.tensors[i].data, b.tensors[i].data, bytes) != 0) {
      return false;
    }
  }
  return true;
}

Batch batch(const Manifest& manifest, const std::vector<const Request*>& requests) {
  IKBO_CHECK(!requests.empty(), "batch: must be given at least one request; got none");
  Batch run;
  run.places = place_all(manifest, requests);
  for (const Placement& place : run.places) {
    run.inputs.num_users += place.shares_user ? 0 : place.num_users;
    run.inputs.num_candidates += place.num_candidates;
  }
  IKBO_CHECK(run.inputs.num_users <= manifest.max_users, "model ", manifest.model_name,
             ": the users of one run must be at most ", manifest.max_users, "; got ",
             run.inputs.num_users, " in ", requests.size(), " requests");
  IKBO_CHECK(run.inputs.num_candidates <= manifest.max_candidates, "model ", manifest.model_name,
             ": the candidates of one run must be at most ", manifest.max_candidates, "; got ",
             run.inputs.num_candidates, " in ", requests.size(), " requests");

  if (manifest.user_stage.has_value()) {
    run.inputs.user_keys = keys_of_users(requests, run);
  }
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
  std::vector<Response> responses(batch.places.size());
  for (std::size_t r = 0; r < responses.size(); ++r) {
    const Placement& place = batch.places[r];
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const TensorSpec& spec = manifest.outputs[i];
      const bool is_user = spec.role == Role::kUser;
      responses[r].outputs.push_back(rows_of(spec, outputs[i],
                                             is_user ? place.first_user : place.first_candidate,
                                             is_user ? place.num_users : place.num_candidates));
    }
  }
  return responses;
}

}  // namespace ikbo::runtime
