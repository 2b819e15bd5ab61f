"""What the ranks agree on: which collectives run, and in which order."""

from __future__ import annotations

from mutant import BOTH, Mutant

ORDER = [
    Mutant(
        "close a list of modules once this rank waits for none of its gradients",
        "csrc/engine/order.cpp",
        "units_[other].uses_to_come > 0",
        "units_[other].missing > 0",
    ),
    Mutant(
        "compare nothing where a backward died",
        "csrc/engine/schedule.cpp",
        "    agree_on_death(in_backward_, order_.started());\n",
        "",
        suites="FullyShardParticipation.*",
    ),
    Mutant(
        "take over a tree that has still to publish",
        "csrc/engine/schedule.cpp",
        "  other.settle();\n",
        "",
        suites="FullyShardParticipation.*",
    ),
    Mutant(
        "free an outer unit while an inner one is used",
        "csrc/engine/order.cpp",
        "other == entered || lies_below(entered, other)) return true;",
        "other == entered || lies_below(other, entered)) return true;",
    ),
    Mutant(
        "swap the order on one rank",
        "csrc/engine/schedule.cpp",
        "  unit->id_ = order_.add(unit->number(), timing);",
        "  const bool other = unit->shards().rank() == 1 || unit->ranks().copies().rank() == 1;\n"
        "  unit->id_ = order_.add(other ? -unit->number() : unit->number(), timing);",
        languages=BOTH,
    ),
    Mutant(
        "compare no structure",
        "csrc/engine/unit_making.cpp",
        "    all = compare_structure(lines, seen, ranks_.axes(), mesh_.rank(), mesh_.device(), counters_);\n",
        "",
        languages=BOTH,
    ),
    Mutant(
        "gather on the process group of the sums",
        "csrc/engine/unit_ranks.cpp",
        "  gather_ = comm::Collectives({group, shards_.names()});",
        "  gather_ = shards_;",
        suites="FullyShardOrder.*:FullyShardFront.*",
    ),
    Mutant(
        "sum on the process group that the program has too",
        "csrc/engine/unit_ranks.cpp",
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
        "  return {histories_[group].issued, histories_[second_group].issued, histories_[first_axis].issued};",
        "  return {histories_[second_group].issued, histories_[group].issued, histories_[first_axis].issued};",
        suites="FullyShardOrder.*",
    ),
    Mutant(
        "do not compare which units are summed",
        "csrc/engine/trees.cpp",
        "4 * static_cast<uint64_t>(unit->number_for_all()) + (sums(*unit) ? 1 : 0) +\n"
        "        (sums(*unit) && unit->options.all_reduce ? 2 : 0));",
        "4 * static_cast<uint64_t>(unit->number_for_all()));",
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
        "  living_[unit]->sums_.begin();",
        "  if (!living_[unit]->outer() || living_[unit]->ranks().copies().rank() != 1) living_[unit]->sums_.begin();",
        languages=BOTH,
    ),
    Mutant(
        "let sums of two trees overlap",
        "csrc/engine/schedule.cpp",
        "  bool late = another_is_first;",
        "  bool late = another_is_first && false;",
        suites="FullyShardRoots.*",
    ),
    Mutant(
        "let sums that share a process group with gathers overlap",
        "csrc/engine/unit_ranks.cpp",
        "  return world() > 1 && (!agreement_ || !sums_apart(customs));",
        "  return world() > 1 && (!agreement_ || (false && !sums_apart(customs)));",
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
