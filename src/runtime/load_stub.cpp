// SPDX-License-Identifier: Apache-2.0
// Model::load in a build without PyTorch: any package runs on the stub executor.
#include "runtime/executor.h"

namespace ikbo::runtime {

std::shared_ptr<Executor> load_executor(const Package& package, const ModelOptions&) {
  return make_stub_executor(package.manifest());
}

}  // namespace ikbo::runtime
