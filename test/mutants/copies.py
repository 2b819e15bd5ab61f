"""How full copies come and go."""

from __future__ import annotations

from mutant import Mutant

COPIES = [
    Mutant(
        "use a full copy that the optimizer left behind",
        "csrc/engine/unit.cpp",
        "  for_full_copies([](group::Copies& copies) { copies.mark_stale(); });",
        "",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "gather and do not wait",
        "csrc/group/full_copies.cpp",
        "      if (pending) pending->wait();",
        "",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "never free full copies",
        "csrc/group/full_copies.cpp",
        "  for (auto& storage : storages_) storage.free();\n  buffers.give(",
        "  buffers.give(",
        suites="FullyShardContract.*",
    ),
    Mutant(
        "free after forward what is to be kept",
        "csrc/engine/unit.cpp",
        "  return options.reshard_after_forward.value_or(outer_ != nullptr);",
        "  return true;",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "close a unit when one inside of it begins",
        "csrc/engine/schedule.cpp",
        "&other == &unit || unit.lies_below(other)) return true;",
        "&other == &unit) return true;",
        suites="FullyShardContract.*",
    ),
    Mutant(
        "keep the piece of another rank",
        "csrc/group/full_copies.cpp",
        "  if (shard.sizes() == whole) return piece_of(shard, cut, rank);",
        "  if (shard.sizes() == whole) return piece_of(shard, cut, rank == 1 ? 0 : rank);",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "follow no change of requires_grad",
        "csrc/group/group.cpp",
        "parameter->leaf_requires_grad() != is_trained)",
        "false)",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "lose what a backward before left under way when something is frozen",
        "csrc/group/group.cpp",
        "  if (gradients_ && settle && !has_those(summed())) settle();\n",
        "  (void)settle;\n",
        suites="FullyShardLastBackward.*",
    ),
    Mutant(
        "lose what a backward before left under way when something is cast",
        "csrc/engine/unit.cpp",
        "    settle();\n    reshard();\n",
        "    reshard();\n",
        suites="FullyShardLastBackward.*",
    ),
    Mutant(
        "cut every small piece from the first row",
        "csrc/group/small_pieces.cpp",
        ".start = cut.starts[static_cast<size_t>(rank)] * row};",
        ".start = 0};",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "gather twice",
        "csrc/group/full_copies.cpp",
        "  pending_ = gather_parts(gathered_, part, collectives, unit, counters);",
        "  gather_parts(gathered_, part, collectives, unit, counters).wait();\n"
        "  pending_ = gather_parts(gathered_, part, collectives, unit, counters);",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "prefetch the units of the other direction",
        "csrc/engine/schedule.cpp",
        "backward ? unit.options.backward_prefetch : unit.options.forward_prefetch",
        "backward ? unit.options.forward_prefetch : unit.options.backward_prefetch",
        suites="FullyShard1DTrainingCore.ExplicitPrefetching:FullyShardPrograms.Prefetching",
    ),
    Mutant(
        "keep full copies of values that changed on the way",
        "csrc/group/full_copies.cpp",
        "  set_state(State::full);\n  return written();\n",
        "  set_state(State::full);\n  return false;\n",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "keep full copies after a backward",
        "csrc/engine/schedule.cpp",
        "    if (unit->reshards_after_backward()) unit->reshard();",
        "    if (!unit->outer() && unit->reshards_after_backward()) unit->reshard();",
        suites="FullyShardContract.*",
    ),
    Mutant(
        "give the memory of a gather back while it is under way",
        "csrc/group/full_copies.cpp",
        "  pending_ = gather_parts(gathered_, part, collectives, unit, counters);\n",
        "  pending_ = gather_parts(gathered_, part, collectives, unit, counters);\n"
        "  if (!is_flat_) buffers.give(gathered_);\n",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "do not wait for a gather that is given up",
        "csrc/group/full_copies.cpp",
        "  if (pending && !pending->settle()) leave_buffers();\n",
        "",
        suites="FullyShardLate.*",
    ),
    Mutant(
        "gather without the user's own collective",
        "csrc/comm/collectives.cpp",
        "    if (custom_) return custom_(flat, input, *line_.group);\n    if (line_.group->hasBackends()) "
        "return line_.group->_allgather_base(flat, input);",
        "    if (line_.group->hasBackends()) return line_.group->_allgather_base(flat, input);",
        suites="FullyShardCustom.*",
    ),
    Mutant(
        "share no buffers between roots",
        "csrc/engine/schedule.h",
        "    buffers_ = other.buffers_;",
        "    (void)other;",
        suites="FullyShardShareCommContext.*",
    ),
    Mutant(
        "hold what another rank is to hold",
        "csrc/group/full_copies.cpp",
        "rank_ % holders * numel",
        "0",
        suites="FullyShardNeighbours.*",
    ),
    Mutant(
        "gather what was held before a shard was written",
        "csrc/group/full_copies.h",
        "return held_.defined() && !written();",
        "return held_.defined();",
        suites="FullyShardNeighbours.*",
    ),
    Mutant(
        "keep what is held after a reshard by hand",
        "csrc/engine/unit.cpp",
        "    if (!hold) copies.drop_held(buffers());\n",
        "    (void)hold;\n",
        suites="FullyShardNeighbours.*",
    ),
    Mutant(
        "gather among all ranks what neighbours hold",
        "csrc/engine/unit.cpp",
        "all_near ? near_ : gathers_apart()",
        "gathers_apart()",
        suites="FullyShardNeighbours.*",
    ),
    Mutant(
        "use what was frozen since the unit was entered as if it were not",
        "csrc/group/full_copies.cpp",
        "  return parameter->requires_grad() == parameter->leaf_requires_grad();",
        "  return parameter != nullptr;",
    ),
    Mutant(
        "use a shard that was replaced since the unit was entered",
        "csrc/group/full_copies.cpp",
        "  if (!index || !fits(*index)) return false;",
        "  if (!index) return false;",
    ),
    Mutant(
        "move to where full copies lay another time",
        "csrc/group/full_copies.cpp",
        "    if (known == places) return",
        "    if (known.first == places.first) return",
    ),
]
