"""What the ranks agree on: which collectives run, and in which order."""

from __future__ import annotations

from mutant import BOTH, Mutant

ORDER = [
    Mutant(
        "swap the order on one rank",
        "csrc/engine/schedule.cpp",
        "get_current_graph_task_id();\n  order_ = reduce_order();",
        "get_current_graph_task_id();\n  order_ = reduce_order();\n"
        "  if (order_.front()->collectives().rank() == 1) std::reverse(order_.begin(), order_.end());",
        languages=BOTH,
    ),
    Mutant(
        "compare no structure",
        "csrc/engine/unit_making.cpp",
        "    all = compare_structure(lines, seen, axes(), mesh_.rank(), mesh_.device(), counters_);\n",
        "",
        languages=BOTH,
    ),
    Mutant(
        "gather on the process group of the sums",
        "csrc/engine/unit_making.cpp",
        "  gather_ = comm::Collectives({group, shards_.names()});",
        "  gather_ = shards_;",
        suites="FullyShardOrder.*:FullyShardFront.*",
    ),
    Mutant(
        "sum on the process group that the program has too",
        "csrc/engine/unit_making.cpp",
        "    if (is_own) collectives =",
        "    if (false) collectives =",
        suites="UsersCollectives.*",
    ),
    Mutant(
        "never compare what comes next",
        "csrc/comm/agreement.cpp",
        "  if (next.size() != 1 || next.front() != event) {",
        "  if (next.size() > 1000 && next.front() != event) {",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "raise nothing where the ranks differ",
        "csrc/comm/agreement.cpp",
        "  if (!same) raise(records);",
        "  (void)same;",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "leave no notes for those that wait",
        "csrc/comm/notes.cpp",
        "      for (const auto& board : boards) board.store->set(board.mine, note);",
        "      (void)note;",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "look at no notes while waiting",
        "csrc/comm/collectives.cpp",
        "    agreement.look(place_, what_());",
        "",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "take a rank that compares for one that will come",
        "csrc/comm/agreement_note.h",
        "    if (compares()) return true;",
        "    if (compares()) return false;",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "tell the others the places on the two process groups the wrong way round",
        "csrc/comm/agreement.cpp",
        "  return {ways_[group].issued, ways_[second_group].issued, ways_[first_axis].issued};",
        "  return {ways_[second_group].issued, ways_[group].issued, ways_[first_axis].issued};",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "do not compare which units are summed",
        "csrc/engine/trees.cpp",
        "4 * static_cast<uint64_t>(unit->number_for_all()) + (sums(*unit) ? 1 : 0) +",
        "4 * static_cast<uint64_t>(unit->number_for_all()) +",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "take every sum for done at once",
        "csrc/comm/waiter.cpp",
        "[&] { return ticket.ended; });",
        "[&] { return ticket.ended || within.count() >= 0; });",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "leave one sum out on one rank",
        "csrc/engine/schedule.cpp",
        "  if (!unit.takes_part()) return;",
        "  if (!unit.takes_part() || (unit.outer() && unit.collectives().rank() == 1)) return;",
        languages=BOTH,
    ),
    Mutant(
        "let sums of two trees overlap",
        "csrc/engine/schedule.cpp",
        "      another_is_first || std::any_of(",
        "      (another_is_first && false) || std::any_of(",
        suites="FullyShardRoots.*",
    ),
    Mutant(
        "let sums that share a process group with gathers overlap",
        "csrc/engine/unit_sums.cpp",
        "  return world() > 1 && (!agreement_ || !sums_apart());",
        "  return world() > 1 && !agreement_;",
        suites="FullyShardOrder.*:FullyShardRoots.*",
    ),
    Mutant(
        "join only the tree that a backward came to",
        "csrc/engine/schedule.cpp",
        "    tree->join(expectation, another_is_first);\n",
        "",
        suites="FullyShardRoots.*",
    ),
]
