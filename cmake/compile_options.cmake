# Options for our own code. torch's headers are SYSTEM, so warnings are ours alone.
# NDEBUG always: libtorch is built with it, and the layout of some of its classes depends on it.
function(shardwise_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Winvalid-pch)
  # Compilers that nobody tried may warn of more. `.ci/run` sets the variable.
  if("$ENV{SHARDWISE_WERROR}")
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  # __FILE__ stands in error texts: no path of the building machine there.
  target_compile_options(${target} PRIVATE
    "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=" "-fmacro-prefix-map=${SHARDWISE_TORCH_DIR}/=torch/")
  target_compile_definitions(${target} PRIVATE NDEBUG USE_DISTRIBUTED USE_C10D_GLOO)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF)
  if(SHARDWISE_SANITIZE)
    target_compile_options(${target} PRIVATE -O1 -fsanitize=${SHARDWISE_SANITIZE} -fno-omit-frame-pointer -g1)
    if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
      # With what the sanitizers insert, g++ 12 sees errors in the standard library's own code that are not there.
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow)
      if(SHARDWISE_SANITIZE STREQUAL thread)
        # It does not see fences; ours are between processes, where it looks at nothing.
        target_compile_options(${target} PRIVATE -Wno-tsan)
      endif()
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${SHARDWISE_SANITIZE})
  endif()
endfunction()

if(SHARDWISE_SANITIZE AND NOT SHARDWISE_SANITIZE MATCHES "^(address|undefined|thread)$")
  message(FATAL_ERROR "shardwise: SHARDWISE_SANITIZE is '${SHARDWISE_SANITIZE}'; it must be address, undefined or thread.")
endif()

# ccache when it is there; the sloppiness lets it cache files that use precompiled headers.
find_program(SHARDWISE_CCACHE ccache)
if(SHARDWISE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${SHARDWISE_CCACHE})
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endif()
