#include "engine/turn.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise::engine {

void Turn::refuse(const std::string& unit, int other, const char* does) {
  throw Error(c10::str(
      "shardwise: thread ", this_thread(), " is about to use ", unit.empty() ? "" : c10::str("unit '", unit, "' of "),
      "a model that thread ", other, " ", does,
      " at this moment. Its full parameters come and go, so one thread at a time may use it, in the same order on "
      "all ranks. Put a lock around whole forwards and training steps. (Several threads may read a "
      "model of C++ under replicate() without mixed precision.)"));
}

} // namespace shardwise::engine
