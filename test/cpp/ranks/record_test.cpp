#include "ranks/sharded_models.h"
#include "support/expect.h"
#include "support/ranks.h"

#include "observe/record.h"

#include <shardwise/record.h>

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

namespace shardwise::test {
namespace {

size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Ranks are threads here: one record has the events of both.
TEST(Record, StepsOfTwoRanks) {
  start_record();
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    const auto options = FullyShardOptions().mesh(rank.mesh());
    fully_shard(*model[0], options);
    fully_shard(*model, options);
    call(*model, torch::ones({2, 4})).sum().backward();
  });
  const auto events = stop_record();
  for (const std::string rank : {"0", "1"}) {
    for (const std::string name : {"(root)", "0"}) {
      for (const std::string kind : {"forward", "backward"}) {
        const auto event = "{\"kind\": \"" + kind + "\", \"name\": \"" + name + "\", \"rank\": " + rank;
        EXPECT_EQ(times(events, event), 1) << event << " in\n" << events;
      }
    }
  }
  EXPECT_EQ(times(events, R"("kind": "reduce-scatter")"), 4);
  // The root stays whole, the layer inside is gathered again. In a first step ranks compare what they run, too.
  EXPECT_EQ(times(events, R"("kind": "all-gather", "name": "the all-gather of unit)"), 6) << events;
  EXPECT_GE(times(events, R"("kind": "wait")"), 4);
  EXPECT_EQ(stop_record(), "[]") << "it ended";
}

TEST(Record, FilesOfTheirOwnForRanks) {
  const auto folder = std::filesystem::path(testing::TempDir()) / c10::str("shardwise-records-", getpid());
  const auto name = [&](int64_t rank) {
    return std::filesystem::path(observe::make_record_file(folder / "new", rank));
  };
  const auto first = name(3);
  EXPECT_EQ(first.filename(), "shardwise-rank3.json");
  std::ofstream(first) << "mine";
  // Whoever comes later, be it from another machine or of another run, leaves it alone.
  EXPECT_EQ(name(3).filename(), "shardwise-rank3-2.json");
  EXPECT_EQ(name(4).filename(), "shardwise-rank4.json");
  std::string text;
  std::getline(std::ifstream(first), text);
  EXPECT_EQ(text, "mine");
  expect_error<Error>(
      [&] { observe::make_record_file(first / "folder", 5); },
      {"rank 5", "cannot be written to", first.string(), "Not a directory", "SHARDWISE_RECORD"});
  for (const auto* left : {"shardwise-rank3.json", "shardwise-rank3-2.json", "shardwise-rank4.json"}) {
    std::remove((folder / "new" / left).c_str());
  }
  std::remove((folder / "new").c_str());
  std::remove(folder.c_str());
}

} // namespace
} // namespace shardwise::test
