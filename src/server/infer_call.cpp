// SPDX-License-Identifier: Apache-2.0
#include "server/infer_call.h"

#include <algorithm>
#include <utility>

#include "server/wire_names.h"

namespace ikbo::server {

using runtime::Manifest;
using runtime::Role;
using runtime::Shape;
using runtime::TensorSpec;
using runtime::TensorView;

namespace {

void check_shape(const Manifest& manifest, const TensorSpec& spec, const Shape& shape) {
  for (const std::int64_t extent : shape) {
    if (extent < 0) {
      bad_request(manifest, "input ", spec.name,
                  ": extents of shape must be integers from 0 on; got ", extent);
    }
  }
  bool fits = shape.size() == spec.shape.size();
  for (std::size_t d = 1; fits && d < shape.size(); ++d) {
    fits = shape[d] == spec.shape[d];
  }
  if (!fits) {
    bad_request(manifest, "input ", spec.name, " must have shape ", show_shape(spec.shape),
                "; got ", show_shape(shape));
  }
}

}  // namespace

void note_call(const InferCall& call, RequestRecord& record) {
  constexpr std::size_t kMaxId = 256;  // of the log and of spans; the answer has it whole
  record.id = shortened(call.id, kMaxId);
  record.users = call.request.num_users;
  record.candidates = call.request.num_candidates;
  record.queued = RequestRecord::Clock::now();
}

std::string show_shape(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::size_t find_tensor(const Manifest& manifest, std::string_view kind, std::string_view name,
                        const std::vector<TensorSpec>& specs) {
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) {
      return i;
    }
  }
  std::string known;
  for (const TensorSpec& spec : specs) {
    known += (known.empty() ? "" : ", ") + spec.name;
  }
  bad_request(manifest, kind, " ", name, " is unknown; it must be one of ", known);
}

bool is_binary_only(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void add_output(const Manifest& manifest, std::size_t index, bool is_binary, std::string_view how,
                std::vector<WantedOutput>& wanted) {
  const TensorSpec& spec = manifest.outputs[index];
  for (const WantedOutput& earlier : wanted) {
    if (earlier.index == index) {
      bad_request(manifest, "output ", spec.name, " must be asked for once; got it twice");
    }
  }
  if (!is_binary && is_binary_only(spec.dtype)) {
    bad_request(manifest, "output ", spec.name, " has datatype ", wire_name(spec.dtype),
                ", which is sent as binary data only; ", how);
  }
  wanted.push_back({index, is_binary});
}

std::optional<std::chrono::microseconds> read_timeout(const Manifest& manifest,
                                                      std::int64_t microseconds) {
  constexpr std::chrono::microseconds kLongest = std::chrono::hours(24);
  if (microseconds < 0) {
    bad_request(manifest, "parameter 'timeout' must be a number of microseconds from 0 on; got ",
                microseconds);
  }
  if (microseconds == 0) {
    return std::nullopt;
  }
  return std::min(std::chrono::microseconds(microseconds), kLongest);
}

void set_user_key(const Manifest& manifest, std::string_view key, runtime::Request& request) {
  constexpr std::size_t kMaxBytes = 256;
  if (key.size() > kMaxBytes) {
    bad_request(manifest, "parameter 'user_key' must have at most ", kMaxBytes, " bytes; got ",
                key.size());
  }
  if (!key.empty() && request.num_users != 1) {
    bad_request(manifest, "parameter 'user_key' must come with one user; got ", request.num_users,
                " users");
  }
  request.user_key = key;
}

RequestInputs::RequestInputs(const Manifest& manifest)
    : manifest_(manifest), is_given_(manifest.inputs.size(), false) {
  request_.tensors.resize(manifest.inputs.size());
}

TensorView& RequestInputs::add(std::size_t index, std::string_view datatype, Shape shape) {
  const TensorSpec& spec = manifest_.inputs[index];
  if (is_given_[index]) {
    bad_request(manifest_, "input ", spec.name, " must be given once; got it twice");
  }
  is_given_[index] = true;
  if (dtype_of_wire_name(datatype) != spec.dtype) {
    bad_request(manifest_, "input ", spec.name, " must have datatype ", wire_name(spec.dtype),
                "; got ", datatype,
                datatype == "BYTES" ? " (BYTES tensors are not supported)" : "");
  }
  check_shape(manifest_, spec, shape);
  TensorView& tensor = request_.tensors[index];
  tensor.dtype = spec.dtype;
  tensor.shape = std::move(shape);
  tensor.bytes = size_of(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(tensor.bytes, static_cast<std::size_t>(extent), &tensor.bytes)) {
      bad_request(manifest_, "input ", spec.name, " must have fewer than 2^64 bytes; got shape ",
                  show_shape(tensor.shape));
    }
  }
  return tensor;
}

void RequestInputs::check_missing() const {
  for (std::size_t i = 0; i < manifest_.inputs.size(); ++i) {
    if (is_given_[i]) {
      continue;
    }
    const TensorSpec& spec = manifest_.inputs[i];
    if (spec.role != Role::kIndex) {
      bad_request(manifest_, "input ", spec.name, " is missing (", wire_name(spec.dtype), " ",
                  show_shape(spec.shape), ")");
    }
    if (request_.num_users != 1) {
      bad_request(manifest_, "input ", spec.name,
                  " is missing; it may be left out only when there is one user, got ",
                  request_.num_users);
    }
  }
}

runtime::Request RequestInputs::finish(std::shared_ptr<const void> owner) {
  // The last tensor of a role counts; check_request compares all others with it.
  for (std::size_t i = 0; i < manifest_.inputs.size(); ++i) {
    if (is_given_[i]) {
      const bool is_user = manifest_.inputs[i].role == Role::kUser;
      (is_user ? request_.num_users : request_.num_candidates) = request_.tensors[i].shape[0];
    }
  }
  check_missing();
  request_.owner = std::move(owner);
  try {
    runtime::check_request(manifest_, request_);
  } catch (const Error& error) {
    throw RequestError(ErrorKind::kBadRequest, client_text(error));
  }
  return std::move(request_);
}

}  // namespace ikbo::server
