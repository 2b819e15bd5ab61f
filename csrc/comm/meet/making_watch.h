#pragma once

#include "base/reason.h"
#include "comm/agree/notes.h"
#include "comm/mesh/axis_group.h"

#include <shardwise/error.h>

#include <chrono>
#include <string>
#include <vector>

namespace shardwise::comm {

/// Ranks make process groups along one axis of a mesh after the other. A rank that fails will not come to the next
/// axis: it tells the ranks that wait for it there, and they raise its error.
class MakingWatch {
 public:
  /// `purpose` distinguishes its keys from others in the stores.
  MakingWatch(const std::vector<AxisGroup>& lines, const std::string& purpose);

  /// Returns what `make` returns. If it raises PeerError, the other ranks are told.
  template <typename Make>
  auto over(const Make& make) {
    try {
      return make();
    } catch (const PeerError& error) {
      tell(base::reason(error));
      throw;
    }
  }
  /// Raises PeerError if another rank failed.
  void look();

 private:
  void tell(const std::string& failure);

  const int64_t rank_;
  Notes notes_;
  Notes::Bytes mine_{0};
  std::chrono::milliseconds pause_;
  std::chrono::steady_clock::time_point next_;
};

} // namespace shardwise::comm
