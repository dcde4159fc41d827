// SPDX-License-Identifier: Apache-2.0
// What ikbo::prepack writes, and how an operator opens it. A packed weight is one uint8 tensor
// [rows, row_bytes] with three sections, each at a multiple of 256 bytes:
//
//   header  int64: magic, version, device kind, dtype, M, tile_m, number of parts, every K_i
//   matrix  [M, K_cand]; on the CPU dense and in the type of sums, elsewhere in the dtype and with
//           rows at multiples of 16 bytes
//   image   the weight as lce_pack() writes it, each K_i filled up with zeros to whole blocks;
//           only where the sm_90 kernels take it (tile_m > 0)
//
// A header in GPU memory cannot be read without waiting for the GPU. Hence `rows` is a fingerprint
// of it, in [2^15, 2^16): what does not fit has other sizes. Where the host reads the memory, the
// header is compared as well.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "torch_ops/checks.h"

namespace ikbo::ops {

enum class PackedDevice : int64_t { kOther = 0, kCpu = 1, kCuda = 2 };

// Everything that the bytes depend on but the values of the weight.
struct PackedFormat {
  PackedDevice device = PackedDevice::kOther;
  ScalarType dtype = ScalarType::Float;  // of the weight
  int64_t m = 0;
  std::vector<int64_t> k_cand;  // of each part
  int64_t tile_m = 0;           // of the image; 0: there is none
  int64_t image_bytes = 0;

  std::vector<int64_t> header() const;
  ScalarType matrix_dtype() const;
  int64_t num_columns() const;   // K_cand
  int64_t row_stride() const;    // of the matrix, in elements
  int64_t matrix_begin() const;  // in bytes
  int64_t image_begin() const;
  std::vector<int64_t> sizes() const;  // of the packed tensor
};

// The format of this library on a device; the result depends on its arguments and, for CUDA, on the
// GPU's architecture.
PackedFormat packed_format(const torch::stable::Device& device, ScalarType dtype, int64_t m,
                           const std::vector<int64_t>& k_cand);

// The matrix of a packed weight, a view.
Tensor packed_matrix(const Tensor& packed, const PackedFormat& format);

struct PackedWeight {
  Tensor matrix;                // [M, K_cand]
  const void* image = nullptr;  // may be nullptr
  int64_t tile_m = 0;           // of the image
};

// Throws, naming the operator, unless `packed` is of this format; says what it was packed for.
PackedWeight open_packed(const char* op, const Tensor& packed, const PackedFormat& format);

}  // namespace ikbo::ops
