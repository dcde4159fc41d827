// SPDX-License-Identifier: Apache-2.0
#include "server/input_reader.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "server/json_tensor.h"
#include "server/wire_names.h"

namespace ikbo::server {
namespace {

using runtime::Shape;
using runtime::TensorView;
using simdjson::dom::array;
using simdjson::dom::element;

}  // namespace

InputReader::InputReader(const runtime::Manifest& manifest, std::shared_ptr<const RequestBody> body)
    : manifest_(manifest),
      storage_(std::make_shared<Storage>()),
      unread_(body->binary()),
      inputs_(manifest) {
  storage_->body = std::move(body);
}

void InputReader::read(element value) {
  const NamedTensor input = read_named_tensor(manifest_, value, "input", manifest_.inputs);
  std::string_view datatype;
  if (input.fields["datatype"].get(datatype) != simdjson::SUCCESS) {
    bad_request(manifest_, input.where, " must have a string 'datatype'");
  }
  read_data(input, inputs_.add(input.index, datatype, read_shape(input)));
}

Shape InputReader::read_shape(const NamedTensor& input) const {
  array extents;
  if (input.fields["shape"].get(extents) != simdjson::SUCCESS) {
    bad_request(manifest_, input.where, " must have an array 'shape'");
  }
  Shape shape;
  for (const element value : extents) {
    std::int64_t extent = 0;
    if (value.get(extent) != simdjson::SUCCESS) {
      bad_request(manifest_, input.where, ": extents of shape must be integers from 0 on; got ",
                  show(value));
    }
    shape.push_back(extent);
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
  if (is_binary_only(tensor.dtype)) {
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

runtime::Request InputReader::finish() {
  if (!unread_.empty()) {
    bad_request(manifest_,
                "the body must end with the last binary tensor (the JSON header and the ",
                "sum of binary_data_size); ", unread_.size(), " bytes are left over");
  }
  return inputs_.finish(storage_);
}

}  // namespace ikbo::server
