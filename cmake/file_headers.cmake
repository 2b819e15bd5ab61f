# The headers of csrc/files: nlohmann/json for JSON, xxHash for checksums. Its sources alone see them, and nothing of
# them is linked or exported. They are the machine's (Debian: nlohmann-json3-dev and libxxhash-dev); else those in the
# folder SHARDWISE_DEPS, which has nlohmann/json.hpp and xxhash.h; else, as the last way, official releases are fetched.
include(FetchContent)
set(SHARDWISE_DEPS "$ENV{SHARDWISE_DEPS}" CACHE PATH "Folder with nlohmann/json.hpp and xxhash.h, where there is no package")

# Fetches an archive and looks for the header in it. No CMakeLists.txt of its own is read.
function(shardwise_fetch_header variable name header url hash)
  message(STATUS "shardwise: fetching ${url}, since ${header} is not on this machine")
  FetchContent_Declare(${name} URL "${url}" URL_HASH SHA256=${hash} SOURCE_SUBDIR no-subdirectory)
  FetchContent_MakeAvailable(${name})
  find_path(${variable} ${header} PATHS "${${name}_SOURCE_DIR}" "${${name}_SOURCE_DIR}/include" NO_DEFAULT_PATH REQUIRED)
endfunction()

find_path(SHARDWISE_JSON_INCLUDE nlohmann/json.hpp PATHS "${SHARDWISE_DEPS}" ENV SHARDWISE_DEPS)
find_path(SHARDWISE_XXHASH_INCLUDE xxhash.h PATHS "${SHARDWISE_DEPS}" ENV SHARDWISE_DEPS)
if(NOT SHARDWISE_JSON_INCLUDE)
  shardwise_fetch_header(SHARDWISE_JSON_INCLUDE shardwise_json nlohmann/json.hpp
    https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    d6c65aca6b1ed68e7a182f4757257b107ae403032760ed6ef121c9d55e81757d)
endif()
if(NOT SHARDWISE_XXHASH_INCLUDE)
  shardwise_fetch_header(SHARDWISE_XXHASH_INCLUDE shardwise_xxhash xxhash.h
    https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.2.tar.gz
    baee0c6afd4f03165de7a4e67988d16f0f2b257b51d0e3cb91909302a26a79c4)
endif()
