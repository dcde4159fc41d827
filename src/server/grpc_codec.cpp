// SPDX-License-Identifier: Apache-2.0
#include "server/grpc_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ikbo/error.h"
#include "server/aligned_buffer.h"
#include "server/wire_names.h"

namespace ikbo::server {
namespace {

using inference::InferTensorContents;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using runtime::Manifest;
using runtime::Tensor;
using runtime::TensorSpec;
using runtime::TensorView;

constexpr std::string_view kHowBinary = "send the inputs as raw_input_contents";

// What the tensors of a request point into.
struct Storage {
  std::shared_ptr<ModelInferRequest> message;
  std::vector<AlignedBuffer> buffers;  // typed contents of another width than the tensor's
};

// The field of `contents` that carries elements of type T.
template <typename T>
auto& field_of(InferTensorContents& contents, std::string_view& name) {
  if constexpr (std::same_as<T, bool>) {
    name = "bool_contents";
    return *contents.mutable_bool_contents();
  } else if constexpr (std::same_as<T, float>) {
    name = "fp32_contents";
    return *contents.mutable_fp32_contents();
  } else if constexpr (std::same_as<T, double>) {
    name = "fp64_contents";
    return *contents.mutable_fp64_contents();
  } else if constexpr (std::same_as<T, std::int64_t>) {
    name = "int64_contents";
    return *contents.mutable_int64_contents();
  } else if constexpr (std::unsigned_integral<T>) {
    name = "uint_contents";
    return *contents.mutable_uint_contents();
  } else {
    name = "int_contents";
    return *contents.mutable_int_contents();
  }
}

std::int64_t count_all(const InferTensorContents& contents) {
  return std::int64_t{0} + contents.bool_contents_size() + contents.int_contents_size() +
         contents.int64_contents_size() + contents.uint_contents_size() +
         contents.uint64_contents_size() + contents.fp32_contents_size() +
         contents.fp64_contents_size() + contents.bytes_contents_size();
}

// Of an input or output, which has a name.
void refuse_parameters(const Manifest& manifest, std::string_view kind, const auto& tensor) {
  if (tensor.parameters().empty()) {
    return;
  }
  for (const std::string_view parameter : kRefusedParameters) {
    if (tensor.parameters().contains(std::string(parameter))) {
      bad_request(manifest, kind, " ", tensor.name(), ": parameter '", parameter,
                  "' is not supported");
    }
  }
}

class GrpcInputReader {
 public:
  GrpcInputReader(const Manifest& manifest, std::shared_ptr<ModelInferRequest> message)
      : manifest_(manifest), storage_(std::make_shared<Storage>()), inputs_(manifest) {
    storage_->message = std::move(message);
  }

  runtime::Request read() {
    ModelInferRequest& message = *storage_->message;
    const int num_raw = message.raw_input_contents_size();
    if (num_raw > 0 && num_raw != message.inputs_size()) {
      bad_request(manifest_, "raw_input_contents must have one element for each of the ",
                  message.inputs_size(), " inputs; got ", num_raw);
    }
    for (int i = 0; i < message.inputs_size(); ++i) {
      read_input(*message.mutable_inputs(i),
                 num_raw > 0 ? &message.raw_input_contents(i) : nullptr);
    }
    return inputs_.finish(storage_);
  }

 private:
  void read_input(ModelInferRequest::InferInputTensor& input, const std::string* raw) {
    const std::size_t index = find_tensor(manifest_, "input", input.name(), manifest_.inputs);
    refuse_parameters(manifest_, "input", input);
    TensorView& tensor = inputs_.add(index, input.datatype(),
                                     runtime::Shape(input.shape().begin(), input.shape().end()));
    if (raw == nullptr) {
      return read_typed(input, tensor);
    }
    if (input.has_contents() && count_all(input.contents()) > 0) {
      bad_request(manifest_, "input ", input.name(),
                  " must have either contents or raw_input_contents; got both");
    }
    if (raw->size() != tensor.bytes) {
      bad_request(manifest_, "input ", input.name(), " must have ", tensor.bytes,
                  " bytes in raw_input_contents (", wire_name(tensor.dtype), " ",
                  show_shape(tensor.shape), "); got ", raw->size());
    }
    tensor.data = raw->data();
  }

  void read_typed(ModelInferRequest::InferInputTensor& input, TensorView& tensor) {
    if (is_binary_only(tensor.dtype)) {
      bad_request(manifest_, "input ", input.name(), " has datatype ", wire_name(tensor.dtype),
                  ", which must be sent in raw_input_contents; got contents");
    }
    runtime::with_native_type(
        tensor.dtype, [&](auto element) { read_elements<decltype(element)>(input, tensor); });
  }

  template <typename T>
  void read_elements(ModelInferRequest::InferInputTensor& input, TensorView& tensor) {
    std::string_view name;
    const auto& values = field_of<T>(*input.mutable_contents(), name);
    const std::size_t count = tensor.bytes / sizeof(T);
    if (static_cast<std::size_t>(values.size()) != count ||
        count_all(input.contents()) != values.size()) {
      bad_request(manifest_, "input ", input.name(), " must have ", count, " values in ", name,
                  " (", wire_name(tensor.dtype), " ", show_shape(tensor.shape), "); got ",
                  values.size(), " there and ", count_all(input.contents()) - values.size(),
                  " in other fields");
    }
    using Field = std::remove_cvref_t<decltype(values[0])>;
    if constexpr (sizeof(Field) == sizeof(T)) {
      tensor.data = values.data();
    } else {
      T* out = reinterpret_cast<T*>(
          storage_->buffers.emplace_back(make_aligned_buffer(tensor.bytes)).get());
      tensor.data = out;
      for (int i = 0; i < values.size(); ++i) {
        if (!std::in_range<T>(values[i])) {
          bad_request(manifest_, "input ", input.name(), ": element ", i, " must fit ",
                      wire_name(tensor.dtype), "; got ", values[i]);
        }
        out[i] = static_cast<T>(values[i]);
      }
    }
  }

  const Manifest& manifest_;
  std::shared_ptr<Storage> storage_;
  RequestInputs inputs_;
};

std::vector<WantedOutput> read_outputs(const Manifest& manifest, const ModelInferRequest& message) {
  const bool are_raw = message.raw_input_contents_size() > 0;
  std::vector<WantedOutput> wanted;
  for (const auto& output : message.outputs()) {
    refuse_parameters(manifest, "output", output);
    add_output(manifest, find_tensor(manifest, "output", output.name(), manifest.outputs), are_raw,
               kHowBinary, wanted);
  }
  if (wanted.empty()) {
    for (std::size_t i = 0; i < manifest.outputs.size(); ++i) {
      add_output(manifest, i, are_raw, kHowBinary, wanted);
    }
  }
  return wanted;
}

std::string read_user_key(const Manifest& manifest, const ModelInferRequest& message) {
  const auto found = message.parameters().find("user_key");
  if (found == message.parameters().end()) {
    return {};
  }
  if (!found->second.has_string_param()) {
    bad_request(manifest, "parameter 'user_key' must be a string; got one of another type");
  }
  return found->second.string_param();
}

template <typename T>
void write_elements(const Tensor& tensor, InferTensorContents& contents) {
  std::string_view name;
  auto& values = field_of<T>(contents, name);
  const T* first = static_cast<const T*>(tensor.data);
  values.Add(first, first + tensor.bytes / sizeof(T));
}

ModelInferResponse begin_answer(const Manifest& manifest, const InferCall& call) {
  ModelInferResponse message;
  message.set_model_name(manifest.model_name);
  message.set_model_version(manifest.model_version);
  message.set_id(call.id);
  return message;
}

ModelInferResponse::InferOutputTensor& add_output(const Manifest& manifest,
                                                  const WantedOutput& wanted,
                                                  ModelInferResponse& message) {
  const TensorSpec& spec = manifest.outputs[wanted.index];
  auto& output = *message.add_outputs();
  output.set_name(spec.name);
  output.set_datatype(std::string(wire_name(spec.dtype)));
  return output;
}

std::int64_t rows_of(const TensorSpec& spec, const runtime::Request& request) {
  return runtime::num_rows(spec.role, request.num_users, request.num_candidates);
}

// Tag and length of a raw_output_contents element.
std::string raw_head(std::size_t bytes) {
  using google::protobuf::io::CodedOutputStream;
  constexpr std::uint32_t kTag = ModelInferResponse::kRawOutputContentsFieldNumber << 3 | 2;
  std::string head;
  google::protobuf::io::StringOutputStream stream(&head);
  CodedOutputStream out(&stream);
  out.WriteTag(kTag);
  out.WriteVarint64(bytes);
  out.Trim();
  return head;
}

}  // namespace

InferCall decode_infer(const Manifest& manifest, std::shared_ptr<ModelInferRequest> message) {
  InferCall call;
  call.id = message->id();
  if (const auto found = message->parameters().find("timeout");
      found != message->parameters().end()) {
    if (!found->second.has_int64_param()) {
      bad_request(manifest, "parameter 'timeout' must be an int64; got one of another type");
    }
    call.timeout = read_timeout(manifest, found->second.int64_param());
  }
  call.outputs = read_outputs(manifest, *message);
  const std::string user_key = read_user_key(manifest, *message);
  call.request = GrpcInputReader(manifest, std::move(message)).read();
  set_user_key(manifest, user_key, call.request);
  return call;
}

GrpcAnswer encode_raw_answer(const Manifest& manifest, const InferCall& call) {
  ModelInferResponse head = begin_answer(manifest, call);
  for (const WantedOutput& wanted : call.outputs) {
    const TensorSpec& spec = manifest.outputs[wanted.index];
    auto& shape = *add_output(manifest, wanted, head).mutable_shape();
    shape.Add(spec.shape.begin(), spec.shape.end());
    shape.Set(0, rows_of(spec, call.request));
  }
  GrpcAnswer answer;
  std::string bytes = head.SerializeAsString();
  for (const WantedOutput& wanted : call.outputs) {
    const TensorSpec& spec = manifest.outputs[wanted.index];
    bytes += raw_head(static_cast<std::size_t>(rows_of(spec, call.request)) * spec.row_bytes());
    answer.parts.push_back({std::exchange(bytes, {}), wanted.index});
  }
  return answer;
}

GrpcAnswer encode_typed_answer(const Manifest& manifest, const InferCall& call,
                               const runtime::Response& response) {
  ModelInferResponse message = begin_answer(manifest, call);
  for (const WantedOutput& wanted : call.outputs) {
    const Tensor& tensor = response.outputs[wanted.index];
    auto& output = add_output(manifest, wanted, message);
    output.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
    runtime::with_native_type(tensor.dtype, [&](auto element) {
      write_elements<decltype(element)>(tensor, *output.mutable_contents());
    });
  }
  return {{{message.SerializeAsString(), std::nullopt}}};
}

}  // namespace ikbo::server
