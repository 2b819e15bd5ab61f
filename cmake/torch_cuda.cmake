# Decides whether NCCL support is built (SHARDWISE_WITH_CUDA) and makes the target shardwise_torch_cuda for it.
# It needs a CUDA build of torch and the headers cuda_runtime.h and nccl.h: from torch's own pip packages or from a
# CUDA toolkit. No nvcc.
set(SHARDWISE_WITH_CUDA OFF)
if(NOT SHARDWISE_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "shardwise: SHARDWISE_CUDA is '${SHARDWISE_CUDA}'; it must be auto, on or off.")
endif()
if(NOT SHARDWISE_CUDA STREQUAL "off")
  file(GLOB _wheel_includes "${SHARDWISE_TORCH_DIR}/../nvidia/*/include")
  find_path(SHARDWISE_CUDA_INCLUDE cuda_runtime.h HINTS ${_wheel_includes} /usr/local/cuda/include)
  find_path(SHARDWISE_NCCL_INCLUDE nccl.h HINTS ${_wheel_includes} /usr/local/cuda/include)
  find_library(SHARDWISE_TORCH_CUDA_LIBRARY torch_cuda HINTS "${SHARDWISE_TORCH_DIR}/lib" NO_DEFAULT_PATH)
  if(SHARDWISE_CUDA_INCLUDE AND SHARDWISE_NCCL_INCLUDE AND SHARDWISE_TORCH_CUDA_LIBRARY)
    set(SHARDWISE_WITH_CUDA ON)
    add_library(shardwise_torch_cuda INTERFACE)
    target_include_directories(shardwise_torch_cuda SYSTEM INTERFACE
      "${SHARDWISE_CUDA_INCLUDE}" "${SHARDWISE_NCCL_INCLUDE}")
    target_compile_definitions(shardwise_torch_cuda INTERFACE USE_C10D_NCCL SHARDWISE_WITH_CUDA)
    target_link_libraries(shardwise_torch_cuda INTERFACE
      "${SHARDWISE_TORCH_CUDA_LIBRARY}" "${SHARDWISE_TORCH_DIR}/lib/libc10_cuda.so")
  elseif(SHARDWISE_CUDA STREQUAL "on")
    message(FATAL_ERROR "shardwise: SHARDWISE_CUDA=on, but something is missing: "
      "libtorch_cuda (${SHARDWISE_TORCH_CUDA_LIBRARY}), cuda_runtime.h (${SHARDWISE_CUDA_INCLUDE}), "
      "nccl.h (${SHARDWISE_NCCL_INCLUDE}). Install a CUDA build of torch with its nvidia packages, or a CUDA toolkit.")
  endif()
endif()
message(STATUS "shardwise: torch ${SHARDWISE_TORCH_VERSION} in ${SHARDWISE_TORCH_DIR}, NCCL ${SHARDWISE_WITH_CUDA}")
