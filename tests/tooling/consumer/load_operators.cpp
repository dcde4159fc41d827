// SPDX-License-Identifier: Apache-2.0
// A process without Python loads the operator library named by the first argument, every symbol
// bound at once, and makes sure that no Python came along.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <string>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: load_operators LIBRARY\n");
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (dlsym(library, "ikbo_set_kernel_trace") == nullptr) {
    std::fprintf(stderr, "%s exports no ikbo_set_kernel_trace\n", argv[1]);
    return 1;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libpython") != std::string::npos ||
        line.find("libtorch_python") != std::string::npos) {
      std::fprintf(stderr, "Python is in the process: %s\n", line.c_str());
      return 1;
    }
  }
  std::printf("loaded\n");
  return 0;
}
