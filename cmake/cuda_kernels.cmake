# Decides whether the CUDA kernels are built (SHARDWISE_WITH_KERNELS): where there is NCCL support, an nvcc, and CUDA's
# static runtime. Without them pieces are moved on CUDA devices by torch's own kernels, one by one.
set(SHARDWISE_WITH_KERNELS OFF)
if(NOT SHARDWISE_KERNELS MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "shardwise: SHARDWISE_KERNELS is '${SHARDWISE_KERNELS}'; it must be auto, on or off.")
endif()
if(NOT SHARDWISE_WITH_CUDA)
  string(PREPEND _lacking "there is no NCCL support: ")
elseif(SHARDWISE_KERNELS STREQUAL "off")
  set(_lacking "SHARDWISE_KERNELS=off")
elseif(NOT CMAKE_CUDA_COMPILER)
  set(_lacking "there is no nvcc")
else()
  # A runtime of its own, that nobody else sees: which one torch brings, and where, is of no matter then.
  find_library(SHARDWISE_CUDART cudart_static HINTS "${SHARDWISE_CUDA_INCLUDE}/../lib" ${SHARDWISE_CUDA_ROOTS}
    PATH_SUFFIXES lib64 targets/x86_64-linux/lib)
  if(SHARDWISE_CUDART)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90) # With PTX, of which the driver makes what newer ones need.
    endif()
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
    enable_language(CUDA)
    set(SHARDWISE_WITH_KERNELS ON)
    set(_lacking "")
  else()
    set(_lacking "there is no libcudart_static.a for ${CMAKE_CUDA_COMPILER}")
  endif()
endif()
# For test/on_gpu_steps.py.
set(SHARDWISE_WITHOUT_KERNELS "${_lacking}" CACHE INTERNAL "Why there are no CUDA kernels")
string(CONCAT _remedy "Install a CUDA toolkit and a CUDA build of torch, or name the folder of a toolkit, "
  "-DSHARDWISE_CUDA_ROOTS=..., or the compiler, -DCMAKE_CUDA_COMPILER=...")
if(_lacking AND SHARDWISE_KERNELS STREQUAL "on")
  message(FATAL_ERROR "shardwise: SHARDWISE_KERNELS=on, but ${_lacking}. ${_remedy}")
elseif(_lacking AND SHARDWISE_WITH_CUDA AND SHARDWISE_KERNELS STREQUAL "auto")
  message(WARNING "shardwise: it is built without its CUDA kernels: ${_lacking}. ${_remedy}")
endif()
message(STATUS "shardwise: CUDA kernels ${SHARDWISE_WITH_KERNELS}")
