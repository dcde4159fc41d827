// SPDX-License-Identifier: Apache-2.0
// A consumer of the installed runtime: opens the package named by the first argument and prints its
// model's name, or the error.
#include <cstdio>

#include "ikbo/error.h"
#include "ikbo/runtime/model.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: open_package FILE\n");
    return 2;
  }
  try {
    const auto package = ikbo::runtime::Package::open(argv[1]);
    std::printf("%s\n", package.manifest().model_name.c_str());
    return 0;
  } catch (const ikbo::Error& error) {
    std::printf("ikbo::Error: %s\n", error.what());
    return 1;
  }
}
