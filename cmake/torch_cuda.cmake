# Decides whether NCCL support is built (SHARDWISE_WITH_CUDA) and makes the target shardwise_torch_cuda for it.
# It needs a CUDA build of torch, and headers of CUDA and NCCL: from torch's own pip packages, which may lack some of
# those that they include themselves, or from a CUDA toolkit. No nvcc.
set(SHARDWISE_WITH_CUDA OFF)
set(SHARDWISE_CUDA_ROOTS "/usr/local/cuda" CACHE STRING "Folders of CUDA toolkits, tried after torch's own packages")
if(NOT SHARDWISE_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "shardwise: SHARDWISE_CUDA is '${SHARDWISE_CUDA}'; it must be auto, on or off.")
endif()

# Sets SHARDWISE_CUDA_INCLUDE to the first folder whose cuda_runtime.h compiles; else `why` to what the compiler said.
function(_shardwise_find_cuda_headers why)
  if(SHARDWISE_CUDA_INCLUDE)
    return()
  endif()
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/cuda_headers.cpp")
  file(WRITE "${probe}" "#include <cuda_runtime.h>\n#include <nccl.h>\nint main() { return 0; }\n")
  set(${why} "there is no cuda_runtime.h" PARENT_SCOPE)
  list(TRANSFORM SHARDWISE_CUDA_ROOTS APPEND "/include" OUTPUT_VARIABLE toolkits)
  foreach(folder IN LISTS _wheel_includes toolkits)
    if(EXISTS "${folder}/cuda_runtime.h")
      try_compile(works "${CMAKE_CURRENT_BINARY_DIR}/cuda_headers" "${probe}" CXX_STANDARD 17
        CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${folder};${SHARDWISE_NCCL_INCLUDE}" OUTPUT_VARIABLE said)
      if(works)
        set(SHARDWISE_CUDA_INCLUDE "${folder}" CACHE PATH "The folder of cuda_runtime.h")
        return()
      endif()
      string(REGEX MATCH "[^\n]*error[^\n]*" error "${said}")
      set(${why} "${folder}/cuda_runtime.h does not compile: ${error}" PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

if(NOT SHARDWISE_CUDA STREQUAL "off")
  file(GLOB _wheel_includes "${SHARDWISE_TORCH_DIR}/../nvidia/*/include")
  find_path(SHARDWISE_NCCL_INCLUDE nccl.h HINTS ${_wheel_includes} /usr/local/cuda/include)
  find_library(SHARDWISE_TORCH_CUDA_LIBRARY torch_cuda HINTS "${SHARDWISE_TORCH_DIR}/lib" NO_DEFAULT_PATH)
  if(NOT SHARDWISE_TORCH_CUDA_LIBRARY)
    set(_lacking "torch is a build for CPUs")
  elseif(NOT SHARDWISE_NCCL_INCLUDE)
    set(_lacking "there is no nccl.h")
  else()
    _shardwise_find_cuda_headers(_lacking)
  endif()
  if(SHARDWISE_TORCH_CUDA_LIBRARY AND SHARDWISE_NCCL_INCLUDE AND SHARDWISE_CUDA_INCLUDE)
    set(SHARDWISE_WITH_CUDA ON)
    add_library(shardwise_torch_cuda INTERFACE)
    target_include_directories(shardwise_torch_cuda SYSTEM INTERFACE
      "${SHARDWISE_CUDA_INCLUDE}" "${SHARDWISE_NCCL_INCLUDE}")
    target_compile_definitions(shardwise_torch_cuda INTERFACE USE_C10D_NCCL SHARDWISE_WITH_CUDA)
    target_link_libraries(shardwise_torch_cuda INTERFACE
      "${SHARDWISE_TORCH_CUDA_LIBRARY}" "${SHARDWISE_TORCH_DIR}/lib/libc10_cuda.so")
  elseif(SHARDWISE_CUDA STREQUAL "on")
    message(FATAL_ERROR "shardwise: SHARDWISE_CUDA=on, but ${_lacking}. Install a CUDA build of torch with its nvidia "
      "packages, and a CUDA toolkit or the package nvidia-cuda-crt, or name the folder of a toolkit: "
      "-DSHARDWISE_CUDA_ROOTS=...")
  elseif(SHARDWISE_TORCH_CUDA_LIBRARY)
    message(WARNING "shardwise: torch is built for CUDA, and shardwise will not be: ${_lacking}. Install a CUDA toolkit "
      "or the package nvidia-cuda-crt, or name the folder of a toolkit: -DSHARDWISE_CUDA_ROOTS=...")
  endif()
endif()
message(STATUS "shardwise: torch ${SHARDWISE_TORCH_VERSION} in ${SHARDWISE_TORCH_DIR}, NCCL ${SHARDWISE_WITH_CUDA}")
