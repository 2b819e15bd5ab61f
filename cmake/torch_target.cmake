# Finds a torch installation and makes the imported target shardwise::torch of it.
# torch's own TorchConfig.cmake needs nvcc when torch was built with CUDA; headers and libraries are all we need.
# This file is installed too: find_package(shardwise) includes it.
#
# Where torch is looked for, first hit wins:
#   SHARDWISE_TORCH_DIR     the folder of the Python package torch (or of an unpacked libtorch)
#   SHARDWISE_TORCH_HINTS   candidate folders set by the including file
#   CMAKE_PREFIX_PATH       entries such as torch.utils.cmake_prefix_path
#   the active Python       (Python_EXECUTABLE, or python3 on the PATH)
# Sets SHARDWISE_TORCH_DIR and SHARDWISE_TORCH_VERSION.

function(_shardwise_is_torch dir result)
  if(EXISTS "${dir}/include/torch/headeronly/version.h" AND EXISTS "${dir}/lib/libtorch_cpu.so")
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

function(_shardwise_find_torch)
  # What was named counts, and is not replaced by another one; what was found by an earlier run may be gone.
  if(SHARDWISE_TORCH_DIR AND NOT SHARDWISE_TORCH_DIR STREQUAL "${SHARDWISE_TORCH_FOUND}")
    get_filename_component(named "${SHARDWISE_TORCH_DIR}" ABSOLUTE)
    _shardwise_is_torch("${named}" found)
    if(NOT found)
      message(FATAL_ERROR "shardwise: SHARDWISE_TORCH_DIR is ${SHARDWISE_TORCH_DIR}, but there is no torch: "
        "include/torch/headeronly/version.h or lib/libtorch_cpu.so is missing below it.")
    endif()
  endif()
  set(candidates ${SHARDWISE_TORCH_DIR} ${SHARDWISE_TORCH_HINTS})
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    list(APPEND candidates "${prefix}" "${prefix}/../..")
  endforeach()
  foreach(candidate IN LISTS candidates)
    get_filename_component(candidate "${candidate}" ABSOLUTE)
    _shardwise_is_torch("${candidate}" found)
    if(found)
      set(SHARDWISE_TORCH_DIR "${candidate}" CACHE PATH "The folder of torch" FORCE)
      set(SHARDWISE_TORCH_FOUND "${candidate}" CACHE INTERNAL "What was found")
      return()
    endif()
  endforeach()
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python)
  endif()
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
    "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "shardwise: no torch found. Give the folder of torch with -DSHARDWISE_TORCH_DIR=..., "
      "or the Python that has it with -DPython_EXECUTABLE=..., "
      "or add `python -c 'import torch; print(torch.utils.cmake_prefix_path)'` to CMAKE_PREFIX_PATH.")
  endif()
  set(SHARDWISE_TORCH_DIR "${dir}" CACHE PATH "The folder of torch" FORCE)
  set(SHARDWISE_TORCH_FOUND "${dir}" CACHE INTERNAL "What was found")
endfunction()

_shardwise_find_torch()
file(STRINGS "${SHARDWISE_TORCH_DIR}/include/torch/headeronly/version.h" _numbers
  REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
string(REGEX REPLACE "[^;]* ([0-9]+)" "\\1" _numbers "${_numbers}")
string(REPLACE ";" "." SHARDWISE_TORCH_VERSION "${_numbers}")

if(NOT TARGET shardwise::torch)
  add_library(shardwise::torch INTERFACE IMPORTED)
  target_include_directories(shardwise::torch SYSTEM INTERFACE
    "${SHARDWISE_TORCH_DIR}/include" "${SHARDWISE_TORCH_DIR}/include/torch/csrc/api/include")
  target_link_directories(shardwise::torch INTERFACE "${SHARDWISE_TORCH_DIR}/lib")
  # The C++ library first: libtorch.so of some versions (2.11) exports a copy of std::filesystem that crashes when called.
  target_link_libraries(shardwise::torch INTERFACE stdc++
    "${SHARDWISE_TORCH_DIR}/lib/libtorch.so" "${SHARDWISE_TORCH_DIR}/lib/libtorch_cpu.so"
    "${SHARDWISE_TORCH_DIR}/lib/libc10.so")
  target_compile_features(shardwise::torch INTERFACE cxx_std_20)
endif()
