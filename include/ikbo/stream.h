// SPDX-License-Identifier: Apache-2.0
// A CUDA stream as an argument, without the CUDA headers.
#pragma once

struct CUstream_st;

namespace ikbo {

using Stream = CUstream_st*;

}  // namespace ikbo
