// SPDX-License-Identifier: Apache-2.0
#include "ikbo/runtime/cut.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "ikbo/error.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

// Made of a whole request for its parts, which share it.
struct CutStorage {
  std::shared_ptr<const void> owner;
  std::vector<Tensor> copies;
};

// The user of each candidate; nothing when all have the same.
std::vector<std::int32_t> read_index(const Manifest& manifest, const Request& request) {
  std::vector<std::int32_t> users;
  for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
    if (manifest.inputs[i].role == Role::kIndex && request.num_users > 1 &&
        request.num_candidates > 0) {
      users.resize(static_cast<std::size_t>(request.num_candidates));
      std::memcpy(users.data(), request.tensors[i].data, request.tensors[i].bytes);
    }
  }
  return users;
}

std::vector<std::int64_t> count_candidates(const Request& request,
                                           const std::vector<std::int32_t>& users) {
  std::vector<std::int64_t> counts(
      static_cast<std::size_t>(std::max<std::int64_t>(request.num_users, 1)));
  counts[0] = users.empty() ? request.num_candidates : 0;
  for (const std::int32_t user : users) {
    ++counts[static_cast<std::size_t>(user)];
  }
  return counts;
}

// Places of the candidates ordered by user, those of one user in their own order.
std::vector<std::int32_t> order_by_user(const std::vector<std::int32_t>& users,
                                        const std::vector<std::int64_t>& counts) {
  std::vector<std::size_t> next(counts.size());
  for (std::size_t u = 1; u < counts.size(); ++u) {
    next[u] = next[u - 1] + static_cast<std::size_t>(counts[u - 1]);
  }
  std::vector<std::int32_t> order(users.size());
  for (std::size_t b = 0; b < users.size(); ++b) {
    order[next[static_cast<std::size_t>(users[b])]++] = static_cast<std::int32_t>(b);
  }
  return order;
}

void gather_rows(const std::byte* rows, std::size_t row_bytes,
                 const std::vector<std::int32_t>& order, std::byte* out) {
  for (const std::int32_t from : order) {
    std::memcpy(out, rows + static_cast<std::size_t>(from) * row_bytes, row_bytes);
    out += row_bytes;
  }
}

void scatter_rows(const std::byte* rows, std::size_t row_bytes, const std::int32_t* order,
                  std::size_t count, std::byte* out) {
  for (std::size_t b = 0; b < count; ++b) {
    std::memcpy(out + static_cast<std::size_t>(order[b]) * row_bytes, rows + b * row_bytes,
                row_bytes);
  }
}

TensorView rows_of(const TensorSpec& spec, const TensorView& whole, std::int64_t first,
                   std::int64_t count) {
  TensorView part = whole;
  part.shape[0] = count;
  part.bytes = static_cast<std::size_t>(count) * spec.row_bytes();
  if (part.bytes > 0) {
    part.data = static_cast<const std::byte*>(whole.data) +
                static_cast<std::size_t>(first) * spec.row_bytes();
  }
  return part;
}

// The candidates' tensors in `order`.
std::vector<TensorView> ordered(const Manifest& manifest, const Request& request,
                                const std::vector<std::int32_t>& order, CutStorage& storage) {
  std::vector<TensorView> tensors = request.tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = manifest.inputs[i];
    if (spec.role == Role::kCandidate && tensors[i].bytes > 0) {
      const OwnedTensor copy = allocate_rows(spec, request.num_candidates);
      gather_rows(static_cast<const std::byte*>(tensors[i].data), spec.row_bytes(), order,
                  copy.data);
      tensors[i] = copy.tensor.view();
      storage.copies.push_back(copy.tensor);
    }
  }
  return tensors;
}

// Sizes and places of the parts; their tensors are still those of the whole.
std::vector<RequestPart> plan_parts(const Request& whole, const std::vector<std::int64_t>& counts,
                                    std::int64_t max_users, std::int64_t max_candidates) {
  std::vector<RequestPart> parts(1);
  std::int64_t users = 0;  // of the last part, the one of a package without users included
  for (std::size_t u = 0; u < counts.size(); ++u) {
    std::int64_t left = counts[u];
    bool goes_on = false;
    do {
      Request* last = &parts.back().request;
      if (users == max_users || (last->num_candidates == max_candidates && left > 0)) {
        const std::int64_t first = parts.back().first_candidate + last->num_candidates;
        parts.push_back({.request = {},
                         .first_user = static_cast<std::int64_t>(u),
                         .first_candidate = first,
                         .goes_on = goes_on});
        last = &parts.back().request;
        users = 0;
      }
      const std::int64_t taken = std::min(left, max_candidates - last->num_candidates);
      last->num_candidates += taken;
      last->num_users = std::min(++users, whole.num_users);
      left -= taken;
      goes_on = true;
    } while (left > 0);
  }
  return parts;
}

// The index of all parts, one after the other.
std::optional<OwnedTensor> part_index(const TensorSpec& spec, const std::vector<RequestPart>& parts,
                                      const std::vector<std::int32_t>& users,
                                      const std::vector<std::int32_t>* order) {
  if (users.empty()) {
    return std::nullopt;
  }
  OwnedTensor index = allocate_rows(spec, static_cast<std::int64_t>(users.size()));
  auto* out = reinterpret_cast<std::int32_t*>(index.data);
  for (const RequestPart& part : parts) {
    for (std::int64_t b = 0; b < part.request.num_candidates; ++b) {
      const auto at = static_cast<std::size_t>(part.first_candidate + b);
      const auto from = order == nullptr ? at : static_cast<std::size_t>((*order)[at]);
      out[at] = users[from] - static_cast<std::int32_t>(part.first_user);
    }
  }
  return index;
}

}  // namespace

CutRequest cut(const Manifest& manifest, const Request& request, std::int64_t max_users,
               std::int64_t max_candidates) {
  IKBO_CHECK(max_users >= 1 && max_candidates >= 1,
             "cut: max_users and max_candidates must be at least 1; got ", max_users, " and ",
             max_candidates);
  const std::vector<std::int32_t> users = read_index(manifest, request);
  const std::vector<std::int64_t> counts = count_candidates(request, users);
  const auto storage = std::make_shared<CutStorage>();
  storage->owner = request.owner;
  std::vector<TensorView> tensors = request.tensors;
  CutRequest result;
  if (!std::is_sorted(users.begin(), users.end())) {
    result.order = std::make_shared<std::vector<std::int32_t>>(order_by_user(users, counts));
    tensors = ordered(manifest, request, *result.order, *storage);
  }
  result.parts = plan_parts(request, counts, max_users, max_candidates);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& spec = manifest.inputs[i];
    if (spec.role == Role::kIndex) {
      if (const auto index = part_index(spec, result.parts, users, result.order.get())) {
        tensors[i] = index->tensor.view();
        storage->copies.push_back(index->tensor);
      }
    }
    for (RequestPart& part : result.parts) {
      const bool is_user = spec.role == Role::kUser;
      part.request.tensors.push_back(
          tensors[i].is_absent()
              ? TensorView{}
              : rows_of(spec, tensors[i], is_user ? part.first_user : part.first_candidate,
                        is_user ? part.request.num_users : part.request.num_candidates));
    }
  }
  for (RequestPart& part : result.parts) {
    part.request.owner = storage;
    part.request.user_key = request.user_key;
  }
  return result;
}

std::size_t cut_bytes(const Manifest& manifest, const Request& request) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < manifest.inputs.size(); ++i) {
    if (request.num_users > 1 && manifest.inputs[i].role != Role::kUser) {
      bytes += request.tensors[i].bytes;
    }
  }
  return bytes;
}

std::size_t output_bytes(const Manifest& manifest, std::int64_t num_users,
                         std::int64_t num_candidates) {
  std::size_t bytes = 0;
  for (const TensorSpec& spec : manifest.outputs) {
    bytes +=
        static_cast<std::size_t>(num_rows(spec.role, num_users, num_candidates)) * spec.row_bytes();
  }
  return bytes;
}

JoinedResponse::JoinedResponse(const Manifest& manifest, std::int64_t num_users,
                               std::int64_t num_candidates)
    : manifest_(manifest) {
  for (const TensorSpec& spec : manifest.outputs) {
    const OwnedTensor whole = allocate_rows(spec, num_rows(spec.role, num_users, num_candidates));
    whole_.outputs.push_back(whole.tensor);
    rows_.push_back(whole.data);
  }
}

void JoinedResponse::add(const CutRequest& cut, std::size_t index, const Response& response) {
  const RequestPart& part = cut.parts[index];
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const std::size_t row_bytes = manifest_.outputs[i].row_bytes();
    const auto* rows = static_cast<const std::byte*>(response.outputs[i].data);
    std::size_t bytes = response.outputs[i].bytes;
    if (bytes == 0) {
      continue;
    }
    const auto first_candidate = static_cast<std::size_t>(part.first_candidate);
    if (manifest_.outputs[i].role == Role::kUser) {
      // Whoever goes on has its row from the part before.
      const std::size_t skipped = part.goes_on ? row_bytes : 0;
      std::memcpy(rows_[i] + static_cast<std::size_t>(part.first_user) * row_bytes + skipped,
                  rows + skipped, bytes - skipped);
    } else if (cut.order != nullptr) {
      scatter_rows(rows, row_bytes, cut.order->data() + first_candidate, bytes / row_bytes,
                   rows_[i]);
    } else {
      std::memcpy(rows_[i] + first_candidate * row_bytes, rows, bytes);
    }
  }
}

Response JoinedResponse::take() { return std::move(whole_); }

}  // namespace ikbo::runtime
