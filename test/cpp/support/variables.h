#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::test {

/// Variables to set, or with nullopt to remove.
using Environment = std::vector<std::pair<std::string, std::optional<std::string>>>;

/// Of no rank, whoever started this process, but for these changes.
inline Environment of_no_rank(const Environment& changes = {}) {
  Environment result;
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_USE_AGENT_STORE"}) {
    result.emplace_back(name, std::nullopt);
  }
  result.insert(result.end(), changes.begin(), changes.end());
  return result;
}

/// While it lives, the environment of this process is changed. For tests whose other threads read no variable.
class Variables {
 public:
  explicit Variables(const Environment& changes) {
    for (const auto& [name, value] : changes) {
      const char* before = std::getenv(name.c_str());
      before_.emplace_back(name, before == nullptr ? std::nullopt : std::optional<std::string>(before));
      put(name, value);
    }
  }
  ~Variables() {
    for (auto change = before_.rbegin(); change != before_.rend(); ++change) put(change->first, change->second);
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  static void put(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      setenv(name.c_str(), value->c_str(), 1);
    } else {
      unsetenv(name.c_str());
    }
  }

  Environment before_;
};

} // namespace shardwise::test
