#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shardwise::files {

/// An object of a pickle, by its place among all of them: they may have each other in any way, also in circles.
using PickleId = size_t;

/// A list, a tuple or a set.
using PickleList = std::vector<PickleId>;
/// In the order of the pickle; a key may come twice.
using PickleDict = std::vector<std::pair<PickleId, PickleId>>;
/// A class or function of Python: module.name.
struct PickleGlobal {
  std::string name;
};
/// What Python would make by calling something. It is a description: nothing is called.
struct PickleCall {
  PickleId callee = 0;
  PickleId arguments = 0;
  /// What Python would then set in it, as in an OrderedDict.
  PickleDict items = {};
};
/// What lies outside of the pickle, as the memory of a tensor does.
struct PickleOutside {
  PickleId which = 0;
};

/// None, which stands for bytes too; a truth value, a whole number (one beyond 64 bits is a float), a float, a text, or
/// one of the above.
using PickleObject = std::variant<
    std::nullptr_t, bool, int64_t, double, std::string, PickleList, PickleDict, PickleGlobal, PickleCall,
    PickleOutside>;

struct SHARDWISE_API Pickle {
  std::deque<PickleObject> objects;
  PickleId root = 0;

  /// The object as this type; nullptr if it is of another.
  template <typename T>
  const T* as(PickleId id) const {
    return std::get_if<T>(&objects.at(id));
  }
};

/// How many operations a pickle may have, of which each makes one object at most: more than those of 200 000 tensors,
/// and few enough for any machine's memory.
constexpr size_t kMostPickleOperations = 10'000'000;

/// Reads a pickle of protocol 2 to 5 without doing what it says: nothing is imported or called. Torch's unpickler for
/// C++ makes None of a state dict with versions, knows neither parameters nor new dtypes, and a pickle that is nested
/// deeply crashes it. `what` is the pickle's name in errors.
/// Raises Error for what is not a pickle, and for one with more operations than the limit.
SHARDWISE_API Pickle parse_pickle(std::string_view text, const std::string& what);

} // namespace shardwise::files
