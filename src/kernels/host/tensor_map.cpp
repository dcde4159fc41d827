// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/tensor_map.h"

#include <cuda_runtime_api.h>

#include "kernels/host/cuda_check.h"

namespace ikbo::host {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's entry point, found at run time so that nothing links against libcuda.
EncodeTiled encode_tiled() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  IKBO_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                   cudaEnableDefault, &found),
                  "ikbo: tensor map");
  IKBO_CHECK(
      found == cudaDriverEntryPointSuccess && entry != nullptr,
      "ikbo: the CUDA driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is "
      "needed");
  return reinterpret_cast<EncodeTiled>(entry);
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMap3d& spec, const char* what) {
  static const EncodeTiled encode = encode_tiled();
  CUtensorMap map;
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(spec.extent[0]),
                                static_cast<cuuint64_t>(spec.extent[1]),
                                static_cast<cuuint64_t>(spec.extent[2])};
  const cuuint64_t stride_bytes[2] = {static_cast<cuuint64_t>(spec.stride[0]) * 2,
                                      static_cast<cuuint64_t>(spec.stride[1]) * 2};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(spec.box[0]),
                             static_cast<cuuint32_t>(spec.box[1]),
                             static_cast<cuuint32_t>(spec.box[2])};
  const cuuint32_t element_stride[3] = {1, 1, 1};
  const CUresult status =
      encode(&map,
             spec.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                           : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             3, const_cast<void*>(spec.data), extent, stride_bytes, box, element_stride,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             spec.swizzles ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  IKBO_CHECK(status == CUDA_SUCCESS, what, ": the driver refused a tensor map of extent [",
             spec.extent[2], ", ", spec.extent[1], ", ", spec.extent[0], "], strides [",
             spec.stride[1], ", ", spec.stride[0], ", 1]; status ", static_cast<int>(status));
  return map;
}

}  // namespace ikbo::host
