// Profilers see what the engine does under labels of the FSDP:: family, with the name of the unit.
#include "ranks/fully_shard_models.h"

#include <ATen/record_function.h>

#include <mutex>
#include <set>

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

TEST(FullyShardLabels, WhatUnitsDo) {
  const Labels labels;
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    stack_loss(ours, 0, rank.rank()).backward();
  });
  std::map<std::string, int> expected;
  std::set<std::string> uses;
  std::set<std::string> expected_uses;
  for (const std::string unit : {" (blocks.0)", " (blocks.1)", " (blocks.2)", ""}) {
    // Of two ranks; the root keeps its full copies after forward.
    const int gathers = unit.empty() ? 2 : 4;
    expected["FSDP::all_gather" + unit] = gathers;
    expected["FSDP::all_gather_copy_out" + unit] = gathers;
    expected["FSDP::post_backward_reduce" + unit] = 2;
    for (const std::string use : {"FSDP::pre_forward", "FSDP::pre_backward"}) expected_uses.insert(use + unit);
  }
  auto found = Labels::counts();
  for (const auto& [label, count] : std::map(found)) {
    // Of every use of a unit that is not the last one's again.
    if (label.rfind("FSDP::pre_", 0) != 0) continue;
    ASSERT_GE(count, 2) << label;
    found.erase(label);
    uses.insert(label);
  }
  ASSERT_EQ(found, expected);
  ASSERT_EQ(uses, expected_uses);
}

TEST(FullyShardLabels, WhatIsGatheredAhead) {
  const Labels labels;
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    shard_stack(ours, sharded_on(rank));
    for (int step = 0; step < 2; ++step) stack_loss(ours, step, rank.rank()).backward();
  });
  // In the second step, of two ranks.
  const std::map<std::string, int> expected{
      {"FSDP::forward_prefetch for blocks.0", 2},  {"FSDP::forward_prefetch for blocks.1", 2},
      {"FSDP::forward_prefetch for blocks.2", 2},  {"FSDP::backward_prefetch for blocks.1", 2},
      {"FSDP::backward_prefetch for blocks.0", 2},
  };
  auto found = Labels::counts();
  std::erase_if(found, [](const auto& entry) { return entry.first.find("prefetch") == std::string::npos; });
  ASSERT_EQ(found, expected);
}

} // namespace shardwise::test
