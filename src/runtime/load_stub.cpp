// SPDX-License-Identifier: Apache-2.0
// Model::load in a build without PyTorch: any package runs on the stub executor.
#include <optional>

#include "runtime/executor.h"

namespace ikbo::runtime {

std::shared_ptr<Executor> load_executor(const Package&, const ModelOptions&,
                                        const Program& program) {
  return make_stub_executor(program.manifest);
}

std::optional<GpuCounts> gpu_counts() { return std::nullopt; }

}  // namespace ikbo::runtime
