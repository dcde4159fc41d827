// SPDX-License-Identifier: Apache-2.0
#include "server/input_reader.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "server/json_tensor.h"
#include "server/v2_codec.h"

namespace ikbo::server {
namespace {

using runtime::Role;
using runtime::Shape;
using runtime::TensorSpec;
using runtime::TensorView;
using simdjson::dom::array;
using simdjson::dom::element;

}  // namespace

InputReader::InputReader(const runtime::Manifest& manifest, std::shared_ptr<const RequestBody> body)
    : manifest_(manifest),
      storage_(std::make_shared<Storage>()),
      unread_(body->binary()),
      is_given_(manifest.inputs.size(), false) {
  storage_->body = std::move(body);
  request_.tensors.resize(manifest.inputs.size());
}

void InputReader::read(element value) {
  const NamedTensor input = read_named_tensor(manifest_, value, "input", manifest_.inputs);
  if (is_given_[input.index]) {
    bad_request(manifest_, input.where, " must be given once; got it twice");
  }
  is_given_[input.index] = true;
  check_dtype(input);
  TensorView& tensor = request_.tensors[input.index];
  tensor.dtype = manifest_.inputs[input.index].dtype;
  tensor.shape = read_shape(input);
  tensor.bytes = size_of(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(tensor.bytes, static_cast<std::size_t>(extent), &tensor.bytes)) {
      bad_request(manifest_, input.where, " must have fewer than 2^64 bytes; got shape ",
                  show_shape(tensor.shape));
    }
  }
  read_data(input, tensor);
}

void InputReader::check_dtype(const NamedTensor& input) const {
  const DType dtype = manifest_.inputs[input.index].dtype;
  std::string_view name;
  if (input.fields["datatype"].get(name) != simdjson::SUCCESS) {
    bad_request(manifest_, input.where, " must have a string 'datatype'");
  }
  if (dtype_of_wire_name(name) != dtype) {
    bad_request(manifest_, input.where, " must have datatype ", wire_name(dtype), "; got ", name,
                name == "BYTES" ? " (BYTES tensors are not supported)" : "");
  }
}

Shape InputReader::read_shape(const NamedTensor& input) const {
  const TensorSpec& spec = manifest_.inputs[input.index];
  array extents;
  if (input.fields["shape"].get(extents) != simdjson::SUCCESS) {
    bad_request(manifest_, input.where, " must have an array 'shape'");
  }
  Shape shape;
  for (const element value : extents) {
    std::int64_t extent = 0;
    if (value.get(extent) != simdjson::SUCCESS || extent < 0) {
      bad_request(manifest_, input.where, ": extents of shape must be integers from 0 on; got ",
                  show(value));
    }
    shape.push_back(extent);
  }
  bool fits = shape.size() == spec.shape.size();
  for (std::size_t d = 1; fits && d < shape.size(); ++d) {
    fits = shape[d] == spec.shape[d];
  }
  if (!fits) {
    bad_request(manifest_, input.where, " must have shape ", show_shape(spec.shape), "; got ",
                show_shape(shape));
  }
  return shape;
}

void InputReader::read_data(const NamedTensor& input, TensorView& tensor) {
  element data;
  element size;
  const bool has_data = input.fields["data"].get(data) == simdjson::SUCCESS;
  const bool has_size =
      input.fields["parameters"]["binary_data_size"].get(size) == simdjson::SUCCESS;
  if (has_data == has_size) {
    bad_request(manifest_, input.where,
                " must have either 'data' or the parameter 'binary_data_size'; got ",
                has_data ? "both" : "neither");
  }
  if (has_data) {
    read_json(input, data, tensor);
  } else {
    read_binary(input, size, tensor);
  }
}

void InputReader::read_json(const NamedTensor& input, element data, TensorView& tensor) {
  if (!has_json_form(tensor.dtype)) {
    bad_request(manifest_, input.where, " has datatype ", wire_name(tensor.dtype),
                ", which must be sent as binary data; got JSON 'data'");
  }
  array items;
  if (data.get(items) != simdjson::SUCCESS) {
    bad_request(manifest_, input.where, ": 'data' must be an array; got ", show(data));
  }
  // An element takes a byte of JSON at least, so no shape can ask for more memory than a fixed
  // multiple of the body.
  if (tensor.bytes / size_of(tensor.dtype) > storage_->body->json().size()) {
    bad_request(manifest_, input.where, ": data must have as many values as its shape ",
                show_shape(tensor.shape), " says; got fewer");
  }
  std::byte* out = storage_->buffers.emplace_back(make_aligned_buffer(tensor.bytes)).get();
  read_json_tensor(items, tensor.dtype, tensor.shape,
                   "model " + manifest_.model_name + ": " + input.where, out);
  tensor.data = out;
}

void InputReader::read_binary(const NamedTensor& input, element size, TensorView& tensor) {
  std::uint64_t bytes = 0;
  if (size.get(bytes) != simdjson::SUCCESS || bytes != tensor.bytes) {
    bad_request(manifest_, input.where, " must have binary_data_size ", tensor.bytes, " (",
                wire_name(tensor.dtype), " ", show_shape(tensor.shape), "); got ", show(size));
  }
  if (bytes > unread_.size()) {
    bad_request(manifest_, input.where, " needs ", bytes, " bytes of binary data; the body has ",
                unread_.size(), " left after the JSON header (Inference-Header-Content-Length) ",
                "and the tensors before");
  }
  tensor.data = unread_.data();
  unread_ = unread_.subspan(bytes);
}

void InputReader::check_missing() const {
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

runtime::Request InputReader::finish() {
  if (!unread_.empty()) {
    bad_request(manifest_,
                "the body must end with the last binary tensor (the JSON header and the ",
                "sum of binary_data_size); ", unread_.size(), " bytes are left over");
  }
  // The last tensor of a role counts; check_request compares all others with it.
  for (std::size_t i = 0; i < manifest_.inputs.size(); ++i) {
    if (is_given_[i]) {
      const bool is_user = manifest_.inputs[i].role == Role::kUser;
      (is_user ? request_.num_users : request_.num_candidates) = request_.tensors[i].shape[0];
    }
  }
  check_missing();
  request_.owner = storage_;
  return std::move(request_);
}

}  // namespace ikbo::server
