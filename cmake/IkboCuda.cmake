# Decides whether the CUDA kernels are built and says so.
option(IKBO_CHECK_INDICES "Let CUDA operators check the values of cand_to_user (for debugging)" OFF)
option(IKBO_RANDOM_DELAYS "Build tests of the Hopper kernels with delays around every barrier" OFF)
set(IKBO_CUDA_ENABLED OFF)
if(NOT IKBO_CUDA STREQUAL "OFF")
  find_program(IKBO_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(IKBO_NVCC)
    set(CMAKE_CUDA_COMPILER ${IKBO_NVCC})
    # Each source names one of two lists. The generic one ends in PTX for devices that come later.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    set(IKBO_GENCODE_SM90A -gencode=arch=compute_90a,code=sm_90a)
    set(IKBO_GENCODE_GENERIC
      -gencode=arch=compute_80,code=sm_80
      -gencode=arch=compute_90,code=sm_90
      -gencode=arch=compute_100,code=[sm_100,compute_100])
    # ptxas names the registers and the spills of each kernel: tools/check_ptxas.py.
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CURRENT_LIST_DIR}/keep_ptxas.sh)
    if(IKBO_CCACHE)
      # NOTE: without CCACHE_DEPEND ccache hashes the preprocessed text of one architecture, and
      # finds an old object when only the code of another one has changed.
      list(APPEND CMAKE_CUDA_COMPILER_LAUNCHER env CCACHE_DEPEND=1 ${IKBO_CCACHE})
    endif()
    enable_language(CUDA)
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA_STANDARD 20)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    set(IKBO_CUDA_ENABLED ON)
    message(STATUS "ikbo: CUDA kernels are built (nvcc ${CMAKE_CUDA_COMPILER_VERSION})")
  elseif(IKBO_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "ikbo: IKBO_CUDA=ON, but nvcc was not found on PATH or in /usr/local/cuda/bin")
  else()
    message(STATUS "ikbo: CUDA kernels are not built: nvcc was not found")
  endif()
endif()
