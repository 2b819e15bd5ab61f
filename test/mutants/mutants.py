"""Ways to break the engine on purpose. Each must make tests fail in C++ and in Python; run.py shows that it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one place: `old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "skip the reduction of one parameter",
        "csrc/group/group.cpp",
        "    parameters_[i]->publish(mean);",
        "    parameters_[i]->publish(i == 1 ? mean.zero_() : mean);",
    ),
    Mutant(
        "sum instead of mean",
        "csrc/group/group.cpp",
        "const double scale = 1.0 / collectives.size();",
        "const double scale = 1.0;",
    ),
    Mutant(
        "swap the order on one rank",
        "csrc/engine/unit.cpp",
        "  for (const auto& unit : units) unit->begin_average();",
        "  if (collectives_.rank() == 1) {\n"
        "    for (size_t i = units.size(); i-- > 0;) units[i]->begin_average();\n"
        "  } else {\n"
        "    for (const auto& unit : units) unit->begin_average();\n"
        "  }",
    ),
    Mutant(
        "forget the counts of used parameters",
        "csrc/group/group.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "",
    ),
    Mutant(
        "give no gradient to a parameter that only other ranks used",
        "csrc/group/group.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "    if (!used_here_[i]) continue;",
    ),
    Mutant(
        "leave an old gradient in the place of an unused parameter",
        "csrc/group/group.cpp",
        "        slot.zero_();\n",
        "",
    ),
    Mutant(
        "average although synchronisation is off",
        "csrc/engine/unit.cpp",
        "  if (!sync_) {",
        "  if (false) {",
    ),
    Mutant(
        "drop what earlier backwards without synchronisation brought",
        "csrc/group/parameter.cpp",
        "    pending_.add_(fresh_);",
        "    pending_ = std::move(fresh_);",
    ),
    Mutant(
        "do not put the visible gradient aside",
        "csrc/group/parameter.cpp",
        "  visible_ = std::exchange(tensor.mutable_grad(), at::Tensor());",
        "",
    ),
    Mutant(
        "keep what a failed backward brought",
        "csrc/engine/backward_watch.cpp",
        "  for (const auto& top : touched_) top->forget_backward();\n}",
        "}",
    ),
    Mutant(
        "reuse a bucket that gradients still lie in",
        "csrc/group/group.cpp",
        "bucket.storage().use_count() == 1;",
        "bucket.storage().use_count() > 0;",
    ),
    Mutant(
        "compare no structure",
        "csrc/engine/unit.cpp",
        "  compare_structure(lines, collectives_, mesh_.device(), counters_);",
        "",
    ),
    Mutant(
        "lose a user's post-accumulate hook",
        "csrc/group/parameter.cpp",
        "  if (ours != nullptr && ours->users_) (*ours->users_)(tensor);",
        "  (void)ours;",
    ),
]
