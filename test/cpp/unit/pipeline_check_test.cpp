// What problem_of() finds: every kind of mistake, planted in a right table.
#include "pipeline/check.h"
#include "pipeline/lower.h"
#include "pipeline/schedules.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// A right table that mistakes are planted in. Actions are named by their text.
class Planted {
 public:
  explicit Planted(Table table) : table_(std::move(table)) {
    CHECK(problem_of(table_) == "");
  }

  Planted& drop(int rank, const std::string& name) {
    auto& actions = table_.of_rank[rank];
    actions.erase(find(rank, name));
    return *this;
  }
  Planted& put_before(int rank, const std::string& name, const Action& action) {
    table_.of_rank[rank].insert(find(rank, name), action);
    return *this;
  }
  Planted& swap(int rank, const std::string& one, const std::string& other) {
    std::iter_swap(find(rank, one), find(rank, other));
    return *this;
  }
  Planted& change(int rank, const std::string& name, const Action& action) {
    *find(rank, name) = action;
    return *this;
  }
  std::string problem() const {
    return problem_of(table_);
  }

 private:
  std::vector<Action>::iterator find(int rank, const std::string& name) {
    auto& actions = table_.of_rank[rank];
    const auto found = std::find_if(actions.begin(), actions.end(), [&](const auto& one) { return text(one) == name; });
    CHECK(found != actions.end());
    return found;
  }

  Table table_;
};

Planted whole() {
  return Planted(one_forward_one_backward(2, 3));
}
Planted halves() {
  return Planted(interleaved_zero_bubble(2, 1, 3));
}
Planted lowered() {
  return Planted(with_transfers(one_forward_one_backward(2, 3)));
}

TEST_CASE("pipeline check: a lost microbatch") {
  CHECK(whole().drop(1, "1F2").drop(1, "1B2").problem() == "rank 1 never does 1F2");
  CHECK(whole().drop(0, "0B2").problem() == "rank 0 never does 0B2 or 0I2");
}

TEST_CASE("pipeline check: something done twice") {
  const auto after = std::string(" although it has done so already");
  CHECK(whole().put_before(0, "0B1", {Kind::backward, 0, 0}).problem() == "rank 0 does 0B0" + after);
  // A half of what was done as a whole, and the other way round.
  CHECK(whole().put_before(0, "0B1", {Kind::backward_input, 0, 0}).problem() == "rank 0 does 0I0" + after);
  CHECK(halves().put_before(0, "0W0", {Kind::backward, 0, 0}).problem() == "rank 0 does 0B0" + after);
}

TEST_CASE("pipeline check: stages of one rank in the wrong order") {
  const auto table = zero_bubble_v(1, 1);
  CHECK(Planted(table).swap(0, "0F0", "1F0").problem() == "rank 0 does 1F0 without 0F0 before it");
  const Table whole{
      1, {0, 0}, {{{Kind::forward, 0, 0}, {Kind::forward, 1, 0}, {Kind::backward, 1, 0}, {Kind::backward, 0, 0}}}};
  CHECK(Planted(whole).swap(0, "0B0", "1B0").problem() == "rank 0 does 0B0 without 1B0 or 1I0 before it");
}

TEST_CASE("pipeline check: the wrong place") {
  CHECK(
      whole().put_before(0, "0F2", {Kind::forward, 1, 0}).problem() == "rank 0 does 1F0, but that stage is on rank 1");
  CHECK(whole().change(0, "0F2", {Kind::forward, 2, 2}).problem() == "rank 0 does 2F2, but there are 2 stages");
  CHECK(whole().change(0, "0F2", {Kind::forward, -1, 2}).problem() == "rank 0 does -1F2, but there are 2 stages");
  CHECK(whole().change(0, "0F2", {Kind::forward, 0, 3}).problem() == "rank 0 does 0F3, but there are 3 microbatches");
  CHECK(whole().change(0, "0F2", {Kind::forward, 0, -1}).problem() == "rank 0 does 0F-1, but there are 3 microbatches");
}

TEST_CASE("pipeline check: a table that is none") {
  CHECK(problem_of({}) == "the table has no ranks");
  CHECK(problem_of({1, {}, {{}}}) == "the table has no stages");
  CHECK(problem_of({0, {0}, {{}}}) == "the table has 0 microbatches");
  CHECK(problem_of({1, {0, 2}, {{}, {}}}) == "stage 1 is on rank 2 of 2");
  CHECK(problem_of({1, {-1}, {{}}}) == "stage 0 is on rank -1 of 1");
}

TEST_CASE("pipeline check: ranks that wait for each other") {
  // The last rank wants the second microbatch back before it lets go of the first.
  const auto table = Planted(one_forward_one_backward(2, 2)).swap(1, "1B0", "1F1").swap(0, "0F1", "0B0");
  CHECK(table.problem() == "no rank can go on: rank 0 at 0B0, rank 1 at 1F1");
}

TEST_CASE("pipeline check: a transfer that is missing or too many") {
  CHECK(lowered().drop(0, "0SF1").problem() == "rank 0 never does 0SF1");
  CHECK(lowered().drop(1, "1RF0").problem() == "rank 1 does 1F0 without 1RF0 before it");
  CHECK(
      lowered().put_before(1, "1B0", {Kind::receive_forward, 1, 0}).problem() ==
      "rank 1 does 1RF0 although it has done so already");
  const auto nowhere = std::string(", but there is no other rank at that end of the stage");
  CHECK(lowered().put_before(0, "0B0", {Kind::send_backward, 0, 0}).problem() == "rank 0 does 0SB0" + nowhere);
  CHECK(lowered().put_before(1, "1B0", {Kind::send_forward, 1, 0}).problem() == "rank 1 does 1SF0" + nowhere);
  CHECK(
      Planted(with_transfers(zero_bubble_v(2, 1))).put_before(1, "2F0", {Kind::send_forward, 1, 0}).problem() ==
      "rank 1 does 1SF0" + nowhere);
}

TEST_CASE("pipeline check: sends that wait for each other") {
  Planted table(with_transfers(one_forward_one_backward(2, 2)));
  // The second activation is received just before its use, when the first gradient is on its way already.
  table.drop(1, "1RF1").put_before(1, "1F1", {Kind::receive_forward, 1, 1});
  CHECK(table.problem() == "no rank can go on: rank 0 at 0SF1, rank 1 at 1SB0");
}

} // namespace
} // namespace shardwise::pipeline
