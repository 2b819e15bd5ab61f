#include "ranks/sharded_models.h"
#include "support/expect.h"
#include "support/folder.h"

#include "observe/record.h"

#include <fstream>

namespace shardwise::test {

TEST(Record, FilesOfTheirOwnForRanks) {
  const TemporaryFolder folder;
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
}

} // namespace shardwise::test
