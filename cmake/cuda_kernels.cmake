# Decides whether the CUDA kernels are built (SHARDWISE_WITH_KERNELS): where there is NCCL support, an nvcc, and CUDA's
# static runtime. Without them pieces are moved on CUDA devices by torch's own kernels, one by one.
set(SHARDWISE_WITH_KERNELS OFF)
if(NOT SHARDWISE_KERNELS MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "shardwise: SHARDWISE_KERNELS is '${SHARDWISE_KERNELS}'; it must be auto, on or off.")
endif()
if(SHARDWISE_WITH_CUDA AND NOT SHARDWISE_KERNELS STREQUAL "off")
  # A runtime of its own, that nobody else sees: which one torch brings, and where, is of no matter then.
  find_library(SHARDWISE_CUDART cudart_static HINTS "${SHARDWISE_CUDA_INCLUDE}/../lib" ${SHARDWISE_CUDA_ROOTS}
    PATH_SUFFIXES lib64 targets/x86_64-linux/lib)
  if(CMAKE_CUDA_COMPILER AND SHARDWISE_CUDART)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90) # With PTX, of which the driver makes what newer ones need.
    endif()
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
    enable_language(CUDA)
    set(SHARDWISE_WITH_KERNELS ON)
  endif()
endif()
if(SHARDWISE_KERNELS STREQUAL "on" AND NOT SHARDWISE_WITH_KERNELS)
  message(FATAL_ERROR "shardwise: SHARDWISE_KERNELS=on, but there is no nvcc (${CMAKE_CUDA_COMPILER}), no libcudart_static "
    "(${SHARDWISE_CUDART}) or no NCCL support (SHARDWISE_CUDA). Install a CUDA toolkit and a CUDA build of torch, or "
    "name the compiler with -DCMAKE_CUDA_COMPILER=...")
endif()
message(STATUS "shardwise: CUDA kernels ${SHARDWISE_WITH_KERNELS}")
