// SPDX-License-Identifier: Apache-2.0
// An executor without compiled code, whose results a test can predict and which mixes each
// candidate with its user as a ranking model does:
//
//   candidate output  out[b, e] = sum(candidate rows b) + sum(user rows i(b)) + e
//   user output       out[u, e] = sum(user rows u) + e
//
// where a sum runs over all elements of that row in all inputs of that role (as doubles, NaN and
// infinity included), i is the index, and e counts the elements of an output row in row-major
// order. Integers saturate and bool is "not zero". float16 and bfloat16 are not supported.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "ikbo/error.h"
#include "runtime/executor.h"
#include "runtime/storage.h"

namespace ikbo::runtime {
namespace {

template <typename Visit>
void with_type(DType dtype, const Visit& visit) {
  IKBO_CHECK(with_native_type(dtype, visit), "stub executor: dtype ", name_of(dtype),
             " is not supported");
}

template <typename T>
T convert(double value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value != 0;
  } else if constexpr (std::is_integral_v<T>) {
    if (std::isnan(value)) {
      return 0;
    }
    // The upper limit as a double may be one above the largest value: hence >=.
    if (value >= static_cast<double>(std::numeric_limits<T>::max())) {
      return std::numeric_limits<T>::max();
    }
    return value <= static_cast<double>(std::numeric_limits<T>::min())
               ? std::numeric_limits<T>::min()
               : static_cast<T>(value);
  } else {
    return static_cast<T>(value);
  }
}

void add_rows(const TensorView& tensor, std::vector<double>& sums) {
  with_type(tensor.dtype, [&](auto sample) {
    using T = decltype(sample);
    const auto* values = static_cast<const T*>(tensor.data);
    const std::size_t width = tensor.bytes / sizeof(T) / sums.size();
    for (std::size_t row = 0; row < sums.size(); ++row) {
      for (std::size_t e = 0; e < width; ++e) {
        sums[row] += static_cast<double>(values[row * width + e]);
      }
    }
  });
}

Tensor make_output(const TensorSpec& spec, const std::vector<double>& sums) {
  const OwnedTensor output = allocate_rows(spec, static_cast<std::int64_t>(sums.size()));
  with_type(spec.dtype, [&](auto sample) {
    using T = decltype(sample);
    auto* values = reinterpret_cast<T*>(output.data);
    const std::size_t width = spec.row_bytes() / sizeof(T);
    for (std::size_t row = 0; row < sums.size(); ++row) {
      for (std::size_t e = 0; e < width; ++e) {
        values[row * width + e] = convert<T>(sums[row] + static_cast<double>(e));
      }
    }
  });
  return output.tensor;
}

class StubExecutor final : public Executor {
 public:
  explicit StubExecutor(const Manifest& manifest) : manifest_(manifest) {}

  std::vector<Tensor> run(const RunInputs& inputs) override {
    std::vector<double> of_user(static_cast<std::size_t>(inputs.num_users));
    std::vector<double> of_candidate(static_cast<std::size_t>(inputs.num_candidates));
    for (std::size_t i = 0; i < inputs.tensors.size(); ++i) {
      if (manifest_.inputs[i].role != Role::kIndex) {
        add_rows(inputs.tensors[i],
                 manifest_.inputs[i].role == Role::kUser ? of_user : of_candidate);
      }
    }
    for (std::size_t i = 0; i < inputs.tensors.size(); ++i) {
      if (manifest_.inputs[i].role == Role::kIndex) {
        const auto* index = static_cast<const std::int32_t*>(inputs.tensors[i].data);
        for (std::size_t b = 0; b < of_candidate.size(); ++b) {
          of_candidate[b] += of_user[static_cast<std::size_t>(index[b])];
        }
      }
    }
    std::vector<Tensor> outputs;
    outputs.reserve(manifest_.outputs.size());
    for (const TensorSpec& spec : manifest_.outputs) {
      outputs.push_back(make_output(spec, spec.role == Role::kUser ? of_user : of_candidate));
    }
    return outputs;
  }

 private:
  Manifest manifest_;
};

}  // namespace

std::shared_ptr<Executor> make_stub_executor(const Manifest& manifest) {
  return std::make_shared<StubExecutor>(manifest);
}

}  // namespace ikbo::runtime
