// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda_graph.h"

#include <dlfcn.h>

#include <string>

#include "ikbo/error.h"

namespace ikbo::runtime {
namespace {

// The file beside the library that this code is in.
std::string library_path() {
  Dl_info own{};
  IKBO_CHECK(dladdr(kMakeCudaGraphStream, &own) != 0, "CUDA graphs: this library has no file");
  const std::string path = own.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libikbo_cuda_graphs.so";
}

}  // namespace

std::unique_ptr<CudaGraphStream> make_cuda_graph_stream() {
  const std::string path = library_path();
  void* library = dlopen(path.c_str(), RTLD_NOW);  // never unloaded: graphs hold its code
  IKBO_CHECK(library != nullptr, "CUDA graphs need ", path,
             ", which a build has where CUDA's headers were found; it cannot be loaded (",
             dlerror(), ")");
  auto* make = reinterpret_cast<MakeCudaGraphStream*>(dlsym(library, kMakeCudaGraphStream));
  IKBO_CHECK(make != nullptr, path, ": must export ", kMakeCudaGraphStream,
             "; take the file of the same build");
  return std::unique_ptr<CudaGraphStream>(make());
}

}  // namespace ikbo::runtime
