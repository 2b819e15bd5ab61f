// Profilers see what the engine does under labels of the FSDP:: family, with the name of the unit.
#include "ranks/fully_shard_models.h"

#include <ATen/record_function.h>

#include <mutex>

namespace shardwise::test {
namespace {

/// The labels of the family that any thread of the process recorded while this was alive.
class Labels {
 public:
  Labels() {
    seen().clear();
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                      const std::string name = function.name();
                                      if (name.rfind("FSDP::", 0) != 0) return std::unique_ptr<at::ObserverContext>();
                                      const std::lock_guard lock(mutex());
                                      ++seen()[name];
                                      return std::unique_ptr<at::ObserverContext>();
                                    }).scopes({at::RecordScope::FUNCTION}));
  }
  ~Labels() {
    at::removeCallback(handle_);
  }
  Labels(const Labels&) = delete;
  Labels& operator=(const Labels&) = delete;

  static std::map<std::string, int> counts() {
    const std::lock_guard lock(mutex());
    return seen();
  }

 private:
  static std::mutex& mutex() {
    static std::mutex value;
    return value;
  }
  static std::map<std::string, int>& seen() {
    static std::map<std::string, int> value;
    return value;
  }
  at::CallbackHandle handle_ = 0;
};

} // namespace

TEST(FullyShardLabels, EveryGatherCopyAndSumHasOne) {
  const Labels labels;
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    stack_loss(ours, 0, rank.rank()).backward();
  });
  std::map<std::string, int> expected;
  for (const std::string unit : {"blocks.0", "blocks.1", "blocks.2", ""}) {
    // Of two ranks; the root keeps its full copies after forward.
    const int gathers = unit.empty() ? 2 : 4;
    expected["FSDP::all_gather (" + unit + ")"] = gathers;
    expected["FSDP::all_gather_copy_out (" + unit + ")"] = gathers;
    expected["FSDP::post_backward_reduce (" + unit + ")"] = 2;
  }
  ASSERT_EQ(Labels::counts(), expected);
}

} // namespace shardwise::test
