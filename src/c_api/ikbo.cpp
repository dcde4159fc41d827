// SPDX-License-Identifier: Apache-2.0
#include "ikbo/ikbo.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ikbo/error.h"
#include "ikbo/runtime/batch.h"
#include "ikbo/runtime/model.h"

namespace runtime = ikbo::runtime;

struct ikbo_error {
  std::string text;
};

struct ikbo_package {
  explicit ikbo_package(runtime::Package opened);

  runtime::Package package;
  std::vector<ikbo_tensor_spec> inputs;
  std::vector<ikbo_tensor_spec> outputs;
  ikbo_package_info info{};
};

struct ikbo_model {
  std::shared_ptr<const runtime::Model> model;
};

struct ikbo_session {
  std::shared_ptr<const runtime::Model> model;
  runtime::Session session;
};

struct ikbo_result {
  std::vector<runtime::Response> responses;
  std::vector<std::vector<ikbo_tensor>> outputs;  // views of the responses
};

namespace {

static_assert(static_cast<int>(ikbo::DType::kBool) == IKBO_BOOL &&
              static_cast<int>(ikbo::DType::kUInt8) == IKBO_UINT8 &&
              static_cast<int>(ikbo::DType::kInt8) == IKBO_INT8 &&
              static_cast<int>(ikbo::DType::kInt16) == IKBO_INT16 &&
              static_cast<int>(ikbo::DType::kInt32) == IKBO_INT32 &&
              static_cast<int>(ikbo::DType::kInt64) == IKBO_INT64 &&
              static_cast<int>(ikbo::DType::kFloat16) == IKBO_FLOAT16 &&
              static_cast<int>(ikbo::DType::kBFloat16) == IKBO_BFLOAT16 &&
              static_cast<int>(ikbo::DType::kFloat32) == IKBO_FLOAT32 &&
              static_cast<int>(ikbo::DType::kFloat64) == IKBO_FLOAT64);
static_assert(static_cast<int>(runtime::Role::kUser) == IKBO_USER &&
              static_cast<int>(runtime::Role::kCandidate) == IKBO_CANDIDATE &&
              static_cast<int>(runtime::Role::kIndex) == IKBO_INDEX);

// There may be no memory for an error either. Never freed.
ikbo_error* out_of_memory() {
  static ikbo_error error{"out of memory"};
  return &error;
}

template <typename Call>
ikbo_error* guarded(const Call& call) noexcept {
  try {
    try {
      call();
      return nullptr;
    } catch (const std::bad_alloc&) {
      return out_of_memory();
    } catch (const std::exception& error) {
      return new ikbo_error{error.what()};
    } catch (...) {
      return new ikbo_error{"an unknown exception"};
    }
  } catch (...) {
    return out_of_memory();
  }
}

void require(const char* function, const char* argument, bool is_given) {
  IKBO_CHECK(is_given, function, ": ", argument, " must not be NULL");
}

// The caller's options, those that its header did not know yet left zero.
template <typename Options>
Options read_options(const char* function, const Options* given) {
  Options options{};
  if (given != nullptr) {
    IKBO_CHECK(given->size >= sizeof(given->size) && given->size <= sizeof(Options), function,
               ": options->size must be the size of the struct, at most ", sizeof(Options),
               "; got ", given->size);
    std::memcpy(static_cast<void*>(&options), given, given->size);
  }
  return options;
}

std::vector<ikbo_tensor_spec> specs_of(const std::vector<runtime::TensorSpec>& specs) {
  std::vector<ikbo_tensor_spec> result;
  for (const runtime::TensorSpec& spec : specs) {
    const runtime::ValueRange range = spec.values.value_or(runtime::ValueRange{});
    result.push_back({spec.name.c_str(), spec.shape.data(),
                      static_cast<std::int32_t>(spec.shape.size()),
                      static_cast<ikbo_dtype>(spec.dtype), static_cast<ikbo_role>(spec.role),
                      spec.values.has_value() ? 1 : 0, range.min, range.max});
  }
  return result;
}

runtime::TensorView view_of(std::size_t input, const ikbo_tensor& tensor) {
  IKBO_CHECK(tensor.dtype >= IKBO_BOOL && tensor.dtype <= IKBO_FLOAT64, "ikbo_session_run: input ",
             input, ": dtype must be an ikbo_dtype; got ", static_cast<int>(tensor.dtype));
  IKBO_CHECK(tensor.rank >= 0 && (tensor.rank == 0 || tensor.shape != nullptr),
             "ikbo_session_run: input ", input, ": shape must have rank extents; got rank ",
             tensor.rank, tensor.shape == nullptr ? " and no shape" : "");
  IKBO_CHECK(tensor.data != nullptr || tensor.bytes == 0, "ikbo_session_run: input ", input,
             ": data must not be NULL, since bytes is ", tensor.bytes);
  return {static_cast<ikbo::DType>(tensor.dtype),
          runtime::Shape(tensor.shape, tensor.shape + tensor.rank), tensor.data, tensor.bytes};
}

runtime::Request request_of(const ikbo_request& given) {
  IKBO_CHECK(given.inputs != nullptr || given.num_inputs == 0,
             "ikbo_session_run: inputs must not be NULL, since num_inputs is ", given.num_inputs);
  runtime::Request request{given.num_users, given.num_candidates, {}, nullptr};
  request.tensors.reserve(given.num_inputs);
  for (std::size_t i = 0; i < given.num_inputs; ++i) {
    request.tensors.push_back(view_of(i, given.inputs[i]));
  }
  return request;
}

std::unique_ptr<ikbo_result> run(ikbo_session& session, const ikbo_request* given,
                                 std::size_t count) {
  const runtime::Manifest& manifest = session.model->manifest();
  std::vector<runtime::Request> requests;
  std::vector<const runtime::Request*> pointers;
  requests.reserve(count);
  pointers.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    requests.push_back(request_of(given[i]));
    runtime::check_request(manifest, requests.back());
  }
  for (const runtime::Request& request : requests) {
    pointers.push_back(&request);
  }
  const runtime::Batch batch = runtime::batch(manifest, pointers);
  auto result = std::make_unique<ikbo_result>();
  result->responses = runtime::split(manifest, batch, session.session.run(batch.inputs));
  for (const runtime::Response& response : result->responses) {
    std::vector<ikbo_tensor>& outputs = result->outputs.emplace_back();
    for (const runtime::Tensor& tensor : response.outputs) {
      outputs.push_back({tensor.data, tensor.bytes, tensor.shape.data(),
                         static_cast<std::int32_t>(tensor.shape.size()),
                         static_cast<ikbo_dtype>(tensor.dtype)});
    }
  }
  return result;
}

}  // namespace

ikbo_package::ikbo_package(runtime::Package opened)
    : package(std::move(opened)),
      inputs(specs_of(package.manifest().inputs)),
      outputs(specs_of(package.manifest().outputs)) {
  const runtime::Manifest& manifest = package.manifest();
  info = {manifest.model_name.c_str(),
          manifest.model_version.c_str(),
          manifest.torch_version.c_str(),
          manifest.device.c_str(),
          manifest.max_users,
          manifest.max_candidates,
          inputs.size(),
          inputs.data(),
          outputs.size(),
          outputs.data(),
          manifest.files.empty() ? 0 : 1};
}

const char* ikbo_version() { return IKBO_VERSION; }
std::int32_t ikbo_abi_version() { return IKBO_ABI_VERSION; }

const char* ikbo_error_message(const ikbo_error* error) {
  return error == nullptr ? "" : error->text.c_str();
}

void ikbo_error_free(ikbo_error* error) {
  if (error != out_of_memory()) {
    delete error;
  }
}

ikbo_error* ikbo_package_open(const char* path, const ikbo_package_options* options,
                              ikbo_package** package) {
  return guarded([&] {
    constexpr const char* kName = "ikbo_package_open";
    require(kName, "path", path != nullptr);
    require(kName, "package", package != nullptr);
    const ikbo_package_options given = read_options(kName, options);
    runtime::PackageTrust trust;
    trust.require_digests = given.require_digests != 0;
    for (std::size_t i = 0; i < given.num_trusted_keys; ++i) {
      require(kName, "trusted_keys", given.trusted_keys != nullptr);
      require(kName, "a trusted key", given.trusted_keys[i] != nullptr);
      trust.keys.emplace_back(given.trusted_keys[i]);
    }
    *package = std::make_unique<ikbo_package>(runtime::Package::open(path, trust)).release();
  });
}

const ikbo_package_info* ikbo_package_get_info(const ikbo_package* package) {
  return package == nullptr ? nullptr : &package->info;
}

void ikbo_package_free(ikbo_package* package) { delete package; }

ikbo_error* ikbo_model_load(const ikbo_package* package, const ikbo_model_options* options,
                            ikbo_model** model) {
  return guarded([&] {
    constexpr const char* kName = "ikbo_model_load";
    require(kName, "package", package != nullptr);
    require(kName, "model", model != nullptr);
    const ikbo_model_options given = read_options(kName, options);
    runtime::ModelOptions load;
    load.ops_library = given.ops_library == nullptr ? "" : given.ops_library;
    load.num_sessions = given.num_sessions == 0 ? 1 : given.num_sessions;
    load.threads_per_run = given.threads_per_run;
    load.graphs.max_graphs = given.cuda_graphs;
    auto loaded = std::make_unique<ikbo_model>();
    loaded->model = runtime::Model::load(package->package, load);
    *model = loaded.release();
  });
}

void ikbo_model_free(ikbo_model* model) { delete model; }

ikbo_error* ikbo_session_create(const ikbo_model* model, ikbo_session** session) {
  return guarded([&] {
    require("ikbo_session_create", "model", model != nullptr);
    require("ikbo_session_create", "session", session != nullptr);
    *session = new ikbo_session{model->model, runtime::Session(model->model)};
  });
}

void ikbo_session_free(ikbo_session* session) { delete session; }

ikbo_error* ikbo_session_run(ikbo_session* session, const ikbo_request* requests,
                             std::size_t num_requests, ikbo_result** result) {
  return guarded([&] {
    require("ikbo_session_run", "session", session != nullptr);
    require("ikbo_session_run", "requests", requests != nullptr);
    require("ikbo_session_run", "result", result != nullptr);
    *result = run(*session, requests, num_requests).release();
  });
}

const ikbo_tensor* ikbo_result_get_outputs(const ikbo_result* result, std::size_t request) {
  const bool is_there = result != nullptr && request < result->outputs.size();
  return is_there ? result->outputs[request].data() : nullptr;
}

void ikbo_result_free(ikbo_result* result) { delete result; }
