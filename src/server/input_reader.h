// SPDX-License-Identifier: Apache-2.0
// The "inputs" of an infer request: JSON elements and raw bytes to tensor views. Private to the
// codec.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/manifest.h"
#include "server/infer_call.h"
#include "server/request_body.h"
#include "server/v2_json.h"

namespace ikbo::server {

// Reads inputs in the order of the request, which is the order of their binary data.
class InputReader {
 public:
  InputReader(const runtime::Manifest& manifest, std::shared_ptr<const RequestBody> body);

  void read(simdjson::dom::element input);
  // After the last input: RequestInputs::finish, and no binary data may be left over.
  runtime::Request finish();

 private:
  struct Storage {
    std::shared_ptr<const RequestBody> body;
    std::vector<AlignedBuffer> buffers;  // what came as JSON
  };

  runtime::Shape read_shape(const NamedTensor& input) const;
  void read_data(const NamedTensor& input, runtime::TensorView& tensor);
  void read_json(const NamedTensor& input, simdjson::dom::element data,
                 runtime::TensorView& tensor);
  void read_binary(const NamedTensor& input, simdjson::dom::element size,
                   runtime::TensorView& tensor);

  const runtime::Manifest& manifest_;
  std::shared_ptr<Storage> storage_;
  std::span<const std::byte> unread_;  // binary data after the inputs read so far
  RequestInputs inputs_;
};

}  // namespace ikbo::server
