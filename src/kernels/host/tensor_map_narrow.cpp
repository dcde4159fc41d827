// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/tensor_map_narrow.h"

#include <cuda_runtime_api.h>

#include "kernels/host/cuda_check.h"

namespace ikbo::host {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled(const char* what) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  IKBO_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                   cudaEnableDefault, &found),
                  what);
  IKBO_CHECK(found == cudaDriverEntryPointSuccess && entry != nullptr, what,
             ": the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is "
             "needed");
  return reinterpret_cast<EncodeTiled>(entry);
}

CUtensorMapSwizzle swizzle_of(int row_bytes) {
  if (row_bytes == 32) return CU_TENSOR_MAP_SWIZZLE_32B;
  return row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

}  // namespace

CUtensorMap make_narrow_tensor_map(const TensorMap3d& spec, const char* what) {
  static const EncodeTiled encode = encode_tiled(what);
  const int row_bytes = spec.box[0] * 2;
  IKBO_CHECK(row_bytes == 32 || row_bytes == 64 || row_bytes == 128, what,
             ": rows of a box must be 32, 64 or 128 bytes; got ", row_bytes);
  cuuint64_t extents[3];
  cuuint64_t stride_bytes[2];
  cuuint32_t boxes[3];
  const cuuint32_t element_strides[3] = {1, 1, 1};
  for (int i = 0; i < 3; ++i) {
    extents[i] = static_cast<cuuint64_t>(spec.extent[i]);
    boxes[i] = static_cast<cuuint32_t>(spec.box[i]);
    if (i > 0) stride_bytes[i - 1] = static_cast<cuuint64_t>(spec.stride[i - 1]) * 2;
  }
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             spec.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             3, const_cast<void*>(spec.data), extents, stride_bytes, boxes, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(row_bytes),
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  IKBO_CHECK(status == CUDA_SUCCESS, what, ": the driver refused a tensor map of extents ",
             spec.extent[2], " ", spec.extent[1], " ", spec.extent[0], "; status ",
             static_cast<int>(status));
  return map;
}

}  // namespace ikbo::host
