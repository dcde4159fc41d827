// SPDX-License-Identifier: Apache-2.0
#include "server/json_tensor.h"

#include <cmath>
#include <concepts>
#include <cstring>
#include <limits>
#include <utility>

#include "server/request_error.h"
#include "server/v2_json.h"
#include "server/wire_names.h"

namespace ikbo::server {
namespace {

using simdjson::dom::array;
using simdjson::dom::element;

template <typename Visit>
void with_json_type(DType dtype, const Visit& visit) {
  if (!runtime::with_native_type(dtype, visit)) {
    IKBO_UNREACHABLE("dtype without a JSON form");
  }
}

template <typename T>
bool read_element(element value, T& out) {
  if constexpr (std::same_as<T, bool>) {
    return value.get(out) == simdjson::SUCCESS;
  } else if constexpr (std::integral<T>) {
    std::int64_t wide = 0;
    if (value.get(wide) != simdjson::SUCCESS || !std::in_range<T>(wide)) {
      return false;
    }
    out = static_cast<T>(wide);
    return true;
  } else {
    double wide = 0;
    if (value.get(wide) != simdjson::SUCCESS ||
        std::abs(wide) > static_cast<double>(std::numeric_limits<T>::max())) {
      return false;
    }
    out = static_cast<T>(wide);
    return true;
  }
}

template <typename T>
class ElementReader {
 public:
  ElementReader(DType dtype, const runtime::Shape& shape, std::string_view where, T* out)
      : dtype_(dtype), shape_(shape), where_(where), out_(out) {}

  void read(array data) {
    std::size_t total = 1;
    for (const std::int64_t extent : shape_) {
      total *= static_cast<std::size_t>(extent);
    }
    const bool is_nested = data.begin() != data.end() && (*data.begin()).is_array();
    if (is_nested) {
      read_nested(data, 0);
    } else {
      read_flat(data, total);
    }
  }

 private:
  void read_nested(array data, std::size_t dim) {
    if (dim + 1 == shape_.size()) {
      return read_flat(data, static_cast<std::size_t>(shape_[dim]));
    }
    std::int64_t count = 0;
    for (const element row : data) {
      array inner;
      if (row.get(inner) != simdjson::SUCCESS) {
        refuse(ErrorKind::kBadRequest, where_,
               ": data must be nested like its shape at every row; ", "got ", show(row),
               " in dimension ", dim);
      }
      if (++count > shape_[dim]) {
        break;
      }
      read_nested(inner, dim + 1);
    }
    if (count != shape_[dim]) {
      refuse(ErrorKind::kBadRequest, where_, ": data must have ", shape_[dim],
             " rows in dimension ", dim, " (= shape[", dim, "]); got ",
             count > shape_[dim] ? "more" : std::to_string(count));
    }
  }

  void read_flat(array data, std::size_t total) {
    std::size_t count = 0;
    for (const element value : data) {
      if (count == total) {
        refuse(ErrorKind::kBadRequest, where_, ": data must have ", total,
               " values (the product of its shape); got more");
      }
      if (!read_element(value, *out_)) {
        refuse(ErrorKind::kBadRequest, where_, ": element ", index_, " must be a value of ",
               wire_name(dtype_), "; got ", show(value));
      }
      ++out_;
      ++index_;
      ++count;
    }
    if (count != total) {
      refuse(ErrorKind::kBadRequest, where_, ": data must have ", total,
             " values (the product of its shape); got ", count);
    }
  }

  DType dtype_;
  const runtime::Shape& shape_;
  std::string_view where_;
  T* out_;
  std::size_t index_ = 0;
};

}  // namespace

void read_json_tensor(array data, DType dtype, const runtime::Shape& shape, std::string_view where,
                      void* out) {
  with_json_type(dtype, [&]<typename T>(T) {
    ElementReader<T>(dtype, shape, where, static_cast<T*>(out)).read(data);
  });
}

void write_json_tensor(const runtime::Tensor& tensor, std::string_view where, JsonWriter& writer) {
  writer.begin_array();
  with_json_type(tensor.dtype, [&]<typename T>(T) {
    const auto* bytes = static_cast<const std::byte*>(tensor.data);
    const std::size_t count = tensor.bytes / sizeof(T);
    for (std::size_t i = 0; i < count; ++i) {
      T value;
      std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
      if constexpr (std::same_as<T, bool>) {
        writer.boolean(value);
      } else {
        if constexpr (std::floating_point<T>) {
          if (!std::isfinite(value)) {
            refuse(ErrorKind::kBadRequest, where, ": element ", i, " is ", value,
                   ", which JSON cannot carry; ask for this output with \"binary_data\": true");
          }
        }
        writer.number(value);
      }
    }
  });
  writer.end_array();
}

}  // namespace ikbo::server
