"""Second sums on meshes of two axes, and what is kept before them."""

from __future__ import annotations

from mutant import Mutant

HYBRID = [
    Mutant(
        "start no second sum before the next unit has its gradients",
        "csrc/engine/order_backward.cpp",
        "if (!may_start() || units_[sums_[launched_]].missing > 0 || !is_over(sums_[launched_])) return;",
        "if (units_[sums_[launched_]].missing > 0 || !may_start()) return;",
        suites="Estimate.CopiesOfShards",
    ),
    Mutant(
        "leave out the second sum",
        "csrc/engine/gradient_sums.cpp",
        "gradients.begin_all_reduce(among_copies, streams(), unit_.name(), unit_.own_counters());",
        "(void)gradients;",
    ),
    Mutant(
        "start the second sum before the first is done",
        "csrc/engine/gradient_sums.cpp",
        "(auto& gradients) { gradients.wait(unit_.buffers()); });\n  if (!in_stream_",
        "(auto&) {});\n  if (!in_stream_",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "divide by the number of shards",
        "csrc/engine/gradient_sums.cpp",
        "static_cast<double>(world))",
        "static_cast<double>(unit_.shards().size()))",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "sum over the copies whatever the flag says",
        "csrc/engine/gradient_sums.cpp",
        "options.all_reduce || !has_copies(unit_)",
        "true",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "lose what the first sum brought",
        "csrc/group/gradients.cpp",
        "      parameter.partial = {piece_in(sum_.vector(), i, rank_, 0), count_of(i)};",
        "",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "keep the last of several first sums only",
        "csrc/group/gradients.cpp",
        "      parameter.partial.values.add_(piece_in(sum_.vector(), i, rank_, 0));",
        "      parameter.partial.values = piece_in(sum_.vector(), i, rank_, 0);",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "forget who used what before a second sum",
        "csrc/group/gradients.cpp",
        "    count_of(i).add_(partial.count);",
        "",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "add first sums to every second sum",
        "csrc/group/gradients_publish.cpp",
        "    parameter->partial = {};\n",
        "",
        suites="FullyShardHybrid.*",
    ),
    Mutant(
        "compare along one axis only",
        "csrc/comm/agree/agreement.cpp",
        "  for (size_t line = 0; line < channels_.size(); ++line) {\n    auto& control",
        "  for (size_t line = 0; line < 1; ++line) {\n    auto& control",
        suites="FullyShardHybrid.RanksThatDiffer*",
    ),
    Mutant(
        "join a comparison without a word to the neighbours",
        "csrc/comm/agree/agreement.cpp",
        "    for (const auto& [board, note] : tell({})) {",
        "    for (const auto& [board, note] : std::vector<std::pair<size_t, Note>>()) {",
        suites="FullyShardHybrid.RanksThatDiffer*",
    ),
]
