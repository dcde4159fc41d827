// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/tensor_map.h"

#include <cuda_runtime_api.h>

#include <sstream>

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

CUtensorMapSwizzle swizzle_of(int bytes, const char* what) {
  IKBO_CHECK(bytes == 0 || bytes == 32 || bytes == 64 || bytes == 128, what,
             ": a tensor map must swizzle over 0, 32, 64 or 128 bytes; got ", bytes);
  if (bytes == 0) return CU_TENSOR_MAP_SWIZZLE_NONE;
  if (bytes == 32) return CU_TENSOR_MAP_SWIZZLE_32B;
  return bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
}

template <int kRank>
CUtensorMap encode_map(const void* data, DType dtype, const std::int64_t (&extent)[kRank],
                       const std::int64_t (&stride)[kRank - 1], const int (&box)[kRank],
                       CUtensorMapSwizzle swizzle, const char* what) {
  static const EncodeTiled encode = encode_tiled();
  CUtensorMap map;
  cuuint64_t extents[kRank];
  cuuint64_t stride_bytes[kRank - 1];
  cuuint32_t boxes[kRank];
  cuuint32_t element_strides[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(extent[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    element_strides[i] = 1;
    if (i > 0) stride_bytes[i - 1] = static_cast<cuuint64_t>(stride[i - 1]) * 2;
  }
  const CUresult status = encode(
      &map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      kRank, const_cast<void*>(data), extents, stride_bytes, boxes, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream sizes;
    for (int i = kRank - 1; i >= 0; --i) {
      sizes << " " << extent[i] << " (stride " << (i > 0 ? stride[i - 1] : 1) << ")";
    }
    IKBO_CHECK(false, what, ": the driver refused a tensor map of extents", sizes.str(),
               "; status ", static_cast<int>(status));
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMap3d& spec, const char* what) {
  return encode_map(spec.data, spec.dtype, spec.extent, spec.stride, spec.box,
                    swizzle_of(spec.swizzle_bytes, what), what);
}

CUtensorMap make_tensor_map(const TensorMap4d& spec, const char* what) {
  return encode_map(spec.data, spec.dtype, spec.extent, spec.stride, spec.box,
                    CU_TENSOR_MAP_SWIZZLE_128B, what);
}

}  // namespace ikbo::host
