// SPDX-License-Identifier: Apache-2.0
// A decoded infer request, whatever protocol it came by, and what the decoders have in common: what
// is checked and how it is said.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/manifest.h"
#include "server/request_error.h"
#include "server/request_record.h"

namespace ikbo::server {

// An output that the client wants, and how.
struct WantedOutput {
  std::size_t index = 0;   // into Manifest::outputs
  bool is_binary = false;  // raw bytes, not numbers of the protocol's own form
};

struct InferCall {
  std::string id;
  std::optional<std::chrono::microseconds> timeout;  // from the request's arrival to its run
  std::vector<WantedOutput> outputs;
  runtime::Request request;
};

// Writes what is known of a decoded request, and that it is decoded now.
void note_call(const InferCall& call, RequestRecord& record);

template <typename... Parts>
[[noreturn]] void bad_request(const runtime::Manifest& manifest, const Parts&... parts) {
  refuse(ErrorKind::kBadRequest, "model ", manifest.model_name, ": ", parts...);
}

// "[-1, 64]"
std::string show_shape(const runtime::Shape& shape);

// The place of `name` in `specs`; `kind` is "input" or "output". The functions and the class below
// throw RequestError(kBadRequest) that names model, tensor, requirement and value.
std::size_t find_tensor(const runtime::Manifest& manifest, std::string_view kind,
                        std::string_view name, const std::vector<runtime::TensorSpec>& specs);

// The request's parameter `timeout`, in microseconds; 0: none.
std::optional<std::chrono::microseconds> read_timeout(const runtime::Manifest& manifest,
                                                      std::int64_t microseconds);

// Sets the request's parameter `user_key`, which only a request of one user may have; empty: none.
void set_user_key(const runtime::Manifest& manifest, std::string_view key,
                  runtime::Request& request);

// Parameters of a tensor whose meaning this server does not know how to honour.
inline constexpr std::string_view kRefusedParameters[] = {"shared_memory_region", "classification"};

// FP16 and BF16 travel as raw bytes only.
bool is_binary_only(DType dtype);

// `how` is what a client does to get the output as raw bytes.
void add_output(const runtime::Manifest& manifest, std::size_t index, bool is_binary,
                std::string_view how, std::vector<WantedOutput>& wanted);

// Collects the inputs of a request in any order.
class RequestInputs {
 public:
  explicit RequestInputs(const runtime::Manifest& manifest);

  // The input of that place in the manifest as the client describes it. The tensor has its dtype,
  // shape and byte count; its data are the caller's to set.
  runtime::TensorView& add(std::size_t index, std::string_view datatype, runtime::Shape shape);
  // After the last input: nothing is missing; counts users and candidates and does
  // runtime::check_request. `owner` keeps what the tensors point into.
  runtime::Request finish(std::shared_ptr<const void> owner);

 private:
  void check_missing() const;

  const runtime::Manifest& manifest_;
  std::vector<bool> is_given_;  // by input of the manifest
  runtime::Request request_;
};

}  // namespace ikbo::server
