# Stops where torch is of a minor version that torch_versions.txt does not have.
set(_list "${CMAKE_CURRENT_LIST_DIR}/torch_versions.txt")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  "${_list}" "${SHARDWISE_TORCH_DIR}/include/torch/headeronly/version.h")
file(STRINGS "${_list}" _supported REGEX "^[0-9]")
string(REGEX MATCH "^[0-9]+[.][0-9]+" _minor "${SHARDWISE_TORCH_VERSION}")
string(REGEX REPLACE "([0-9]+[.][0-9]+)[.][0-9]+" "\\1" SHARDWISE_TORCH_MINORS "${_supported}")
if(NOT _minor IN_LIST SHARDWISE_TORCH_MINORS)
  list(JOIN SHARDWISE_TORCH_MINORS ", " _minors)
  list(GET _supported -1 _newest)
  message(FATAL_ERROR "shardwise: torch ${SHARDWISE_TORCH_VERSION} in ${SHARDWISE_TORCH_DIR} is not supported: "
    "shardwise ${SHARDWISE_VERSION} works with torch ${_minors}. Install one of these, such as with "
    "`pip install torch==${_newest}`, or name the Python or the folder that has it: -DPython_EXECUTABLE=... or "
    "-DSHARDWISE_TORCH_DIR=...")
endif()
