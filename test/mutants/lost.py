"""What happens when ranks die, come again, or do something else than the others."""

from __future__ import annotations

from mutant import BOTH, PYTHON, Mutant

_LOST = "LostRanks.*"
_APART = "RanksApart*"

LOST = [
    Mutant(
        "take a store as those before left it",
        "csrc/comm/meet/rendezvous.cpp",
        "c10::make_intrusive<c10d::PrefixStore>(word, spec.store)",
        "spec.store",
        languages=BOTH,
        suites=_LOST,
    ),
    Mutant(
        "greet nobody before a process group is made",
        "csrc/comm/meet/second_group.cpp",
        "      return exchange_cards(\n",
        "      if (limit.count() > 0) return std::vector<std::string>();\n      return exchange_cards(\n",
        languages=BOTH,
        suites=_LOST,
    ),
    Mutant(
        "look at no process while the ranks of a group are called",
        "csrc/comm/meet/second_group.cpp",
        "      refuse_dead(spec, processes);\n",
        "      if (spec.size == 0) refuse_dead(spec, processes);\n",
        suites=_LOST,
    ),
    Mutant(
        "make process groups of units without a look at what other ranks tell",
        "csrc/comm/mesh/mesh_state.h",
        "    some.look = [agreement, what] { agreement->look_beside(what); };\n",
        "",
        suites="LostRanks.AFailureAlongAnotherAxis*",
    ),
    Mutant(
        "tell nobody that process groups of units were not made",
        "csrc/comm/mesh/mesh_state.h",
        "      agreement->fail(error.what());\n",
        "      throw;\n",
        suites="LostRanks.AFailureAlongAnotherAxis*",
    ),
    Mutant(
        "tell nobody that the process groups of an agreement were not made",
        "csrc/comm/meet/making_watch.h",
        "      tell(base::reason(error));\n",
        "",
        suites="LostRanks.AFailureAlongAnotherAxis*",
    ),
    Mutant(
        "do not look who died while a process group is made",
        "csrc/comm/mesh/process_group.cpp",
        "    if (ended.empty()) return;",
        "    if (ended.size() < 1000) return;",
        suites=_LOST,
    ),
    Mutant(
        "tell nobody that a collective failed",
        "csrc/comm/agree/agreement.cpp",
        "    Note last{.failed = 1};",
        "    Note last{};",
        suites=_LOST,
    ),
    Mutant(
        "compare no state dicts with what others do",
        "csrc/nn/state/module_state.cpp",
        "    unit->ranks().meet(comm::Agreement::kState, describe(function), unit->own_counters());\n",
        "",
        suites=_APART,
    ),
    Mutant(
        "compare no norms with what others do",
        "csrc/nn/state/gradient_norm.cpp",
        "reduce(unit, {unit.ranks().for_event(comm::Agreement::kClipping, kWhat, unit.own_counters())});",
        "reduce(unit, std::vector<comm::Collectives>{unit.shards()});",
        suites=_APART,
    ),
    Mutant(
        "ask nobody while the program's own call is waited for",
        "csrc/transport/onlooker.cpp",
        "if (const auto onlooker = one.lock()) onlooker->look_at(call());",
        "if (const auto onlooker = one.lock()) call();",
        languages=BOTH,
        suites=_APART,
    ),
    Mutant(
        "take a call that this rank made for one that it owes",
        "csrc/comm/agree/agreement_note.h",
        "    return made && *made < static_cast<uint64_t>(number);",
        "    return made.has_value();",
        suites=_APART,
    ),
    Mutant(
        "wait for the store in a look",
        "csrc/comm/agree/agreement.cpp",
        "    notes_.leave(bytes);\n",
        "    notes_.leave(bytes);\n    notes_.flush(std::chrono::hours(1));\n",
        suites=_APART,
    ),
    Mutant(
        "compare what ranks do by its text",
        "csrc/comm/agree/agreement_note.h",
        "return chain == other.chain && event == other.event && waits == other.waits",
        "return chain == other.chain && text == other.text && waits == other.waits",
        suites=_APART,
    ),
    Mutant(
        "call ranks by their places in the process group",
        "csrc/transport/progress.h",
        "    return names_.empty() ? rank : names_[static_cast<size_t>(rank)];",
        "    return rank;",
        suites=_APART,
    ),
    Mutant(
        "take a port that is taken for one that is late",
        "csrc/comm/meet/environment.cpp",
        "    if (options.isServer && is_taken(master_port)) {",
        "    if (options.isServer && is_taken(0)) {",
        suites="MeshEnvironment.*",
    ),
    Mutant(
        "say nothing of the environment where a back end is not made",
        "python/shardwise/_transport.py",
        '        raise _C.PeerError(f"{error} The environment of this rank says {said}.") from None',
        "        raise",
        languages=PYTHON,
        suites="ranks/test_lost_ranks.py",
    ),
]
