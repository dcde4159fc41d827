// SPDX-License-Identifier: Apache-2.0
#include "torch_ops/packed_weight.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include "torch_ops/aten_calls.h"
#ifdef IKBO_WITH_CUDA
#include "ikbo/lce.h"
#include "torch_ops/cuda_context.h"
#endif

namespace ikbo::ops {
namespace {

constexpr int64_t kVersion = 1;                 // of all that follows, the image's layout included
constexpr int64_t kMagic = 0x6b6361706f626b69;  // "ikbopack"
constexpr int64_t kFieldsBeforeParts = 7;
constexpr int64_t kAlignment = 256;    // of a section
constexpr int64_t kRowAlignment = 16;  // of the matrix's rows
constexpr uint64_t kFingerprints = uint64_t{1} << 15;

int64_t filled_up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

int64_t bytes_of(const std::vector<int64_t>& words) {
  return static_cast<int64_t>(words.size() * sizeof(int64_t));
}

int64_t element_bytes(ScalarType dtype) {
  if (dtype == ScalarType::Double) return 8;
  return dtype == ScalarType::Float ? 4 : 2;
}

// FNV-1a over the bytes, folded.
uint64_t fingerprint(const std::vector<int64_t>& words) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const int64_t word : words) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ (static_cast<uint64_t>(word) >> shift & 0xff)) * 0x100000001b3;
    }
  }
  return (hash ^ hash >> 15 ^ hash >> 30 ^ hash >> 45) % kFingerprints;
}

const char* device_text(int64_t device) {
  if (device == static_cast<int64_t>(PackedDevice::kCpu)) return "cpu";
  return device == static_cast<int64_t>(PackedDevice::kCuda) ? "cuda" : "another device";
}

// "float32 on cpu with M = 4, k_cand = [3, 5]"
std::string header_text(const std::vector<int64_t>& header) {
  std::ostringstream text;
  text << dtype_text(static_cast<ScalarType>(header[3])) << " on " << device_text(header[2])
       << " with M = " << header[4]
       << ", k_cand = " << list_text({header.begin() + kFieldsBeforeParts, header.end()});
  if (header[5] > 0) text << ", tile_m = " << header[5];
  return text.str();
}

Tensor flat_bytes(const Tensor& packed, int64_t begin, int64_t count) {
  Tensor flat = torch::stable::view(packed, {packed.numel()});
  return torch::stable::narrow(flat, 0, begin, count);
}

// What the header of a tensor says; waits for its device. Only for the text of an error.
std::string found_text(const Tensor& packed) {
  const bool may_have_header = packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                               packed.numel() >= kAlignment;
  if (!may_have_header) {
    return "is no packed weight";
  }
  const int64_t most = std::min<int64_t>(packed.numel(), int64_t{1} << 16) / 8 * 8;
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor bytes =
      torch::stable::to(flat_bytes(packed, 0, most), std::nullopt, std::nullopt, cpu);
  std::vector<int64_t> words(most / 8);
  std::memcpy(words.data(), bytes.const_data_ptr(), most);
  const auto num_words = static_cast<int64_t>(words.size());
  if (words[0] != kMagic || words[6] < 1 || words[6] > num_words - kFieldsBeforeParts) {
    return "is no packed weight";
  }
  if (words[1] != kVersion) {
    return "was packed by another version of ikbo";
  }
  words.resize(kFieldsBeforeParts + words[6]);
  return "was packed for " + header_text(words);
}

bool has_header(const Tensor& packed, const std::vector<int64_t>& header) {
  return std::memcmp(packed.const_data_ptr(), header.data(), bytes_of(header)) == 0;
}

}  // namespace

std::vector<int64_t> PackedFormat::header() const {
  std::vector<int64_t> words{
      kMagic, kVersion, static_cast<int64_t>(device),       static_cast<int64_t>(dtype),
      m,      tile_m,   static_cast<int64_t>(k_cand.size())};
  words.insert(words.end(), k_cand.begin(), k_cand.end());
  return words;
}

ScalarType PackedFormat::matrix_dtype() const {
  const bool is_16_bit = element_bytes(dtype) == 2;
  return device == PackedDevice::kCpu && is_16_bit ? ScalarType::Float : dtype;
}

int64_t PackedFormat::num_columns() const {
  return std::accumulate(k_cand.begin(), k_cand.end(), int64_t{0});
}

int64_t PackedFormat::row_stride() const {
  const bool is_dense = device == PackedDevice::kCpu;
  return is_dense ? num_columns() : filled_up(num_columns(), kRowAlignment / element_bytes(dtype));
}

int64_t PackedFormat::matrix_begin() const { return filled_up(bytes_of(header()), kAlignment); }

int64_t PackedFormat::image_begin() const {
  return matrix_begin() + filled_up(m * row_stride() * element_bytes(matrix_dtype()), kAlignment);
}

std::vector<int64_t> PackedFormat::sizes() const {
  const auto rows = static_cast<int64_t>(kFingerprints + fingerprint(header()));
  const int64_t bytes = image_begin() + image_bytes;
  return {rows, (bytes + rows - 1) / rows};
}

PackedFormat packed_format(const torch::stable::Device& device, ScalarType dtype, int64_t m,
                           const std::vector<int64_t>& k_cand) {
  PackedFormat format{.dtype = dtype, .m = m, .k_cand = k_cand};
  if (device.is_cpu()) {
    format.device = PackedDevice::kCpu;
  }
  if (device.is_cuda()) {
    format.device = PackedDevice::kCuda;
#ifdef IKBO_WITH_CUDA
    const LceConfig config = select_lce_pack_config(static_cast<int32_t>(m), kernel_dtype(dtype),
                                                    query_device_limits(device.index()));
    int32_t padded_k = 0;
    for (const int64_t k : k_cand) {
      padded_k += lce_padded_k(static_cast<int32_t>(k));
    }
    format.tile_m = config.tile_m;
    format.image_bytes = static_cast<int64_t>(lce_packed_bytes(padded_k, config));
#endif
  }
  return format;
}

Tensor packed_matrix(const Tensor& packed, const PackedFormat& format) {
  const ScalarType dtype = format.matrix_dtype();
  const int64_t row = format.row_stride();
  const Tensor bytes =
      flat_bytes(packed, format.matrix_begin(), format.m * row * element_bytes(dtype));
  Tensor rows =
      torch::stable::view(call_aten("aten::view", "dtype", bytes, dtype), {format.m, row});
  return torch::stable::narrow(rows, 1, 0, format.num_columns());
}

PackedWeight open_packed(const char* op, const Tensor& packed, const PackedFormat& format) {
  const std::vector<int64_t> sizes = format.sizes();
  const std::vector<int64_t> header = format.header();
  const bool fits =
      packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
      std::equal(sizes.begin(), sizes.end(), packed.sizes().begin(), packed.sizes().end()) &&
      (!packed.device().is_cpu() || has_header(packed, header));
  STD_TORCH_CHECK(fits, "ikbo::", op, ": w_cand_packed must be packed for ", header_text(header),
                  "; got a tensor that ", found_text(packed),
                  "; call ikbo.prepack on the device and in the dtype of the inputs");
  PackedWeight weight;
  weight.matrix = packed_matrix(packed, format);
  if (format.tile_m > 0) {
    weight.tile_m = format.tile_m;
    weight.image = static_cast<const char*>(packed.const_data_ptr()) + format.image_begin();
  }
  return weight;
}

}  // namespace ikbo::ops
