// SPDX-License-Identifier: Apache-2.0
#include "fixtures.h"
#include "runtime/cuda_device.h"

namespace ikbo::runtime::testing {
namespace {

TEST(CudaDevice, MustHaveThePackagesComputeCapability) {
  Manifest compiled = manifest();
  compiled.device = "cuda";
  compiled.compute_capability = 90;
  EXPECT_NO_THROW(check_compute_capability("m.pt2", compiled, 90));
  for (const int other : {80, 86, 89, 100, 103}) {
    EXPECT_NE(error_of([&] { check_compute_capability("m.pt2", compiled, other); }), "");
  }
  expect_contains(error_of([&] { check_compute_capability("m.pt2", compiled, 103); }),
                  "m.pt2: was compiled for compute capability 9.0; this process' first GPU has "
                  "10.3: package the model on a GPU of the kind that runs it");
}

}  // namespace
}  // namespace ikbo::runtime::testing
