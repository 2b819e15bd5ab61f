"""How gradients are collected, summed and given out."""

from __future__ import annotations

from mutant import BOTH, Mutant

SUMS = [
    Mutant(
        "skip the reduction of one parameter",
        "csrc/group/gradients.cpp",
        "    parameters_[i]->publish(mean);",
        "    parameters_[i]->publish(i == 1 ? mean.zero_() : mean);",
        languages=BOTH,
    ),
    Mutant(
        "show nobody the sum",
        "csrc/group/gradients.cpp",
        "    hook(sum);\n",
        "    (void)sum;\n",
        suites="FullyShardCustom.*",
    ),
    Mutant(
        "sum instead of mean",
        "csrc/group/gradients.cpp",
        "    fill(i, local, 1 / before);",
        "    fill(i, local, 1);",
        languages=BOTH,
    ),
    Mutant(
        "forget the counts of used parameters",
        "csrc/group/gradients.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "",
        languages=BOTH,
    ),
    Mutant(
        "give no gradient to a parameter that only other ranks used",
        "csrc/group/gradients.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "    if (!used_here_[i]) continue;",
        languages=BOTH,
    ),
    Mutant(
        "leave an old gradient in the place of an unused parameter",
        "csrc/group/gradients.cpp",
        "      slot.zero_();",
        "      ;",
        languages=BOTH,
    ),
    Mutant(
        "average although synchronisation is off",
        "csrc/engine/unit_sums.cpp",
        "!options.sync ? Sums::nothing : options.all_reduce || !has_copies(*this) ? Sums::all : Sums::shards;\n"
        "  if (!options.sync || world() == 1) return;\n",
        "Sums::all;\n  if (world() == 1) return;\n",
        languages=BOTH,
    ),
    Mutant(
        "drop what earlier backwards without synchronisation brought",
        "csrc/group/parameter.cpp",
        "    pending_.add_(fresh_);",
        "    pending_ = std::move(fresh_);",
        languages=BOTH,
    ),
    Mutant(
        "do not put the visible gradient aside",
        "csrc/group/parameter.cpp",
        "  put_aside_ = std::exchange(tensor.mutable_grad(), at::Tensor());",
        "",
        languages=BOTH,
    ),
    Mutant(
        "keep what a failed backward brought",
        "csrc/engine/backward_watch.cpp",
        "  for (const auto& tree : touched_) tree->abandon_backward();\n}",
        "}",
        languages=BOTH,
    ),
    Mutant(
        "reuse a bucket that gradients still lie in",
        "csrc/group/gradients.cpp",
        "sum.storage().use_count() == 1;",
        "sum.storage().use_count() > 0;",
        languages=BOTH,
    ),
    Mutant(
        "lose a user's post-accumulate hook",
        "csrc/group/parameter.cpp",
        "  if (users != nullptr) (*users)(tensor);",
        "  (void)users;",
        languages=BOTH,
    ),
    Mutant(
        "leave out a sum on the way",
        "csrc/engine/schedule.cpp",
        "  if (const auto before = in_flight_.lock()) before->wait_reduce();\n  in_flight_",
        "  in_flight_",
    ),
    Mutant(
        "reduce before all gradients are there",
        "csrc/engine/schedule.cpp",
        "if (!may_start() || unit.backward.missing > 0) return;",
        "if (!may_start()) return;",
    ),
    Mutant(
        "sum large gradients instead of averaging them",
        "csrc/group/gradients.cpp",
        "const auto factor = at::native::wrapped_scalar_tensor(scale);",
        "const auto factor = at::native::wrapped_scalar_tensor(1.0);",
        suites="FullyShardSizes.*",
    ),
    Mutant(
        "leave out the broadcast at wrapping",
        "csrc/engine/unit_making.cpp",
        "  if (settings.broadcast) {",
        "  if (settings.broadcast && own.empty()) {",
    ),
    Mutant(
        "sum only the units that ran in backward",
        "csrc/engine/unit_sums.cpp",
        "  return settings_.replicates || backward.engaged;",
        "  return settings_.replicates || backward.entered;",
        suites="FullyShardParticipation.*",
    ),
    Mutant(
        "forget the sums that the backward before left under way",
        "csrc/engine/schedule.cpp",
        "  if (backward_ != -1) return;\n  settle();\n",
        "  if (backward_ != -1) return;\n",
        suites="FullyShardLastBackward.*",
    ),
    Mutant(
        "publish at the end of every backward",
        "csrc/engine/schedule.cpp",
        "  if (is_last_backward) settle();",
        "  settle();",
        suites="FullyShardLastBackward.*",
    ),
    Mutant(
        "start no sum of a backward that died",
        "csrc/engine/schedule.cpp",
        "    start_sums([] { return true; });",
        "",
        suites="FullyShardParticipation.*",
    ),
    Mutant(
        "publish a sum before it is there",
        "csrc/group/gradients.cpp",
        "  pending.wait();\n",
        "",
        languages=BOTH,
    ),
]
