// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include "ikbo/runtime/cuda_graphs.h"

namespace ikbo::server {

// The flags of packages for CUDA; `graphs` gets their values, and the defaults.
void add_gpu_flags(CLI::App& app, runtime::GraphOptions& graphs);

}  // namespace ikbo::server
