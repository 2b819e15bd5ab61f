#include "pipeline/make.h"

#include <shardwise/error.h>

namespace shardwise::pipeline {
namespace {

void expect_positive(const ScheduleShape& shape, int value, const std::string& what) {
  if (value >= 1) return;
  throw ValueError(
      "shardwise: " + shape.name + "() got " + what + "=" + std::to_string(value) +
      "; a pipeline has at least one. Give it 1 or more.");
}

} // namespace

Table make_table(
    const ScheduleShape& shape, const std::function<int(int stage)>& rank_of,
    const std::function<std::vector<Action>(int rank)>& list_of) {
  expect_positive(shape, shape.ranks, "ranks");
  expect_positive(shape, shape.stages_per_rank, "stages_per_rank");
  expect_positive(shape, shape.microbatches, "microbatches");
  Table table{shape.microbatches, {}, {}};
  for (int stage = 0; stage < shape.ranks * shape.stages_per_rank; ++stage)
    table.rank_of_stage.push_back(rank_of(stage));
  for (int rank = 0; rank < shape.ranks; ++rank) table.of_rank.push_back(list_of(rank));
  return table;
}

} // namespace shardwise::pipeline
