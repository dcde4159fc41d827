# Imported targets over the installed PyTorch package. find_package(Torch) is not used: its config
# insists on a CUDA toolkit even where nothing of CUDA is compiled.
#   ikbo_torch_ops_abi  headers of the LibTorch stable ABI and libtorch_cpu
#   ikbo_torch_full     the full C++ API, for the AOTInductor loader alone
if(NOT IKBO_TORCH_DIR)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
    OUTPUT_VARIABLE IKBO_TORCH_DIR
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE ikbo_torch_missing)
  if(ikbo_torch_missing)
    message(FATAL_ERROR "ikbo: ${Python3_EXECUTABLE} has no torch; run `make setup`, or pass "
                        "-DPython3_EXECUTABLE=<python with torch>")
  endif()
endif()
set(IKBO_TORCH_DIR ${IKBO_TORCH_DIR} CACHE PATH "The torch package's folder")
message(STATUS "ikbo: PyTorch at ${IKBO_TORCH_DIR}")

foreach(lib torch_cpu c10)
  add_library(ikbo_${lib} SHARED IMPORTED)
  set_target_properties(ikbo_${lib} PROPERTIES
    IMPORTED_LOCATION ${IKBO_TORCH_DIR}/lib/lib${lib}.so)
endforeach()

add_library(ikbo_torch_ops_abi INTERFACE)
target_include_directories(ikbo_torch_ops_abi SYSTEM INTERFACE ${IKBO_TORCH_DIR}/include)
target_compile_definitions(ikbo_torch_ops_abi INTERFACE TORCH_TARGET_VERSION=0x020b000000000000ULL)
target_link_libraries(ikbo_torch_ops_abi INTERFACE ikbo_torch_cpu ikbo_c10)

add_library(ikbo_torch_full INTERFACE)
target_include_directories(ikbo_torch_full SYSTEM INTERFACE
  ${IKBO_TORCH_DIR}/include ${IKBO_TORCH_DIR}/include/torch/csrc/api/include)
target_link_libraries(ikbo_torch_full INTERFACE ikbo_torch_cpu ikbo_c10)

# CUDA's headers: those of the packages that PyTorch's wheel for CUDA depends on, or the toolkit's.
if(EXISTS ${IKBO_TORCH_DIR}/lib/libtorch_cuda.so)
  file(GLOB ikbo_cuda_wheels ${IKBO_TORCH_DIR}/../nvidia/cu*/include)
  find_path(IKBO_CUDA_HEADERS cuda_runtime_api.h
            HINTS ${ikbo_cuda_wheels} /usr/local/cuda/include)
endif()
if(IKBO_CUDA_HEADERS)
  message(STATUS "ikbo: CUDA graphs are built (headers at ${IKBO_CUDA_HEADERS})")
else()
  message(STATUS "ikbo: CUDA graphs are not built: PyTorch is without CUDA, or its headers are "
                 "absent")
endif()
