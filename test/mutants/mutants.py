"""Ways to break the engine on purpose. Each must make tests fail in its languages; run.py shows that it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change of one place: `old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    languages: tuple[str, ...] = ("C++", "Python")


MUTANTS = [
    Mutant(
        "skip the reduction of one parameter",
        "csrc/group/gradients.cpp",
        "    parameters_[i]->publish(mean);",
        "    parameters_[i]->publish(i == 1 ? mean.zero_() : mean);",
    ),
    Mutant(
        "sum instead of mean",
        "csrc/group/gradients.cpp",
        "fill(i, local, 1.0 / collectives.size());",
        "fill(i, local, 1.0);",
    ),
    Mutant(
        "swap the order on one rank",
        "csrc/engine/schedule.cpp",
        "  order_ = reduce_order();",
        "  order_ = reduce_order();\n"
        "  if (order_.front()->collectives().rank() == 1) std::reverse(order_.begin(), order_.end());",
    ),
    Mutant(
        "forget the counts of used parameters",
        "csrc/group/gradients.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "",
    ),
    Mutant(
        "give no gradient to a parameter that only other ranks used",
        "csrc/group/gradients.cpp",
        "    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;",
        "    if (!used_here_[i]) continue;",
    ),
    Mutant(
        "leave an old gradient in the place of an unused parameter",
        "csrc/group/gradients.cpp",
        "gradient.defined() ? at::mul_out(slot, gradient, factor) : slot.zero_();",
        "gradient.defined() ? at::mul_out(slot, gradient, factor) : slot;",
    ),
    Mutant(
        "average although synchronisation is off",
        "csrc/engine/unit.cpp",
        "  averages_ = options.sync;\n  if (!options.sync || gather_.size() == 1) return;\n",
        "  averages_ = true;\n  if (gather_.size() == 1) return;\n",
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
        "  put_aside_ = std::exchange(tensor.mutable_grad(), at::Tensor());",
        "",
    ),
    Mutant(
        "keep what a failed backward brought",
        "csrc/engine/backward_watch.cpp",
        "  for (const auto& tree : touched_) tree->abandon_backward();\n}",
        "}",
    ),
    Mutant(
        "reuse a bucket that gradients still lie in",
        "csrc/group/gradients.cpp",
        "sum.storage().use_count() == 1;",
        "sum.storage().use_count() > 0;",
    ),
    Mutant(
        "compare no structure",
        "csrc/engine/unit.cpp",
        "  compare_structure(lines, gather_, mesh_.device(), counters_);",
        "",
    ),
    Mutant(
        "lose a user's post-accumulate hook",
        "csrc/group/parameter.cpp",
        "  if (users != nullptr) (*users)(tensor);",
        "  (void)users;",
    ),
    Mutant(
        "use a full copy that the optimizer left behind",
        "csrc/engine/unit.cpp",
        "  for_full_copies([](group::FullCopies& copies) { copies.mark_stale(); });",
        "",
        languages=("C++",),
    ),
    Mutant(
        "gather and do not wait",
        "csrc/group/full_copies.cpp",
        "      if (pending) pending->wait();",
        "",
        languages=("C++",),
    ),
    Mutant(
        "never free full copies",
        "csrc/group/full_copies.cpp",
        "  for (auto& storage : storages_) storage.free();\n  state_",
        "  state_",
        languages=("C++",),
    ),
    Mutant(
        "free after forward what is to be kept",
        "csrc/engine/unit.cpp",
        "  return options.reshard_after_forward.value_or(outer_ != nullptr);",
        "  return true;",
        languages=("C++",),
    ),
    Mutant(
        "close a unit when one inside of it begins",
        "csrc/engine/schedule.cpp",
        "other != &unit && !unit.lies_below(*other)",
        "other != &unit",
        languages=("C++",),
    ),
    Mutant(
        "leave out a sum on the way",
        "csrc/engine/schedule.cpp",
        "  if (in_flight_) in_flight_->wait_reduce();\n  in_flight_ = unit.shared_from_this();",
        "  in_flight_ = unit.shared_from_this();",
        languages=("C++",),
    ),
    Mutant(
        "reduce before all gradients are there",
        "csrc/engine/schedule.cpp",
        "if (unit.backward.missing > 0) return;",
        "",
        languages=("C++",),
    ),
    Mutant(
        "publish the piece of another rank",
        "csrc/group/full_copies.cpp",
        "  if (shard.sizes() == whole) {",
        "  if (shard.sizes() == whole && rank != 1) {",
        languages=("C++",),
    ),
    Mutant(
        "follow no change of requires_grad",
        "csrc/group/group.cpp",
        "parameter->leaf().requires_grad() != is_trained)",
        "false)",
        languages=("C++",),
    ),
    Mutant(
        "gather on the process group of the sums",
        "csrc/engine/unit.cpp",
        "    unit->separate_ = mesh.reduce_group(axis) != mesh.group(axis);",
        "    unit->separate_ = true;\n    unit->reduce_ = unit->gather_;",
        languages=("C++",),
    ),
    Mutant(
        "cut every small piece from the first row",
        "csrc/group/small_pieces.cpp",
        ".start = cut.starts[static_cast<size_t>(rank)] * row};",
        ".start = 0};",
        languages=("C++",),
    ),
    Mutant(
        "sum large gradients instead of averaging them",
        "csrc/group/gradients.cpp",
        "const auto factor = at::native::wrapped_scalar_tensor(scale);",
        "const auto factor = at::native::wrapped_scalar_tensor(1.0);",
        languages=("C++",),
    ),
    Mutant(
        "give the bucket back while the sum is under way",
        "csrc/group/gradients.cpp",
        "  pending_ = scattered() ?",
        "  if (scattered()) buffers.give(bucket_);\n  pending_ = scattered() ?",
        languages=("C++",),
    ),
    Mutant(
        "do not wait for the sums",
        "csrc/group/gradients.cpp",
        "  pending.wait();\n",
        "",
        languages=("C++",),
    ),
    Mutant(
        "do not wait for the sums of a backward that was not the last",
        "csrc/engine/schedule.cpp",
        "if (const auto unit = std::exchange(in_flight_, nullptr)) unit->wait_reduce();",
        "in_flight_.reset();",
        languages=("C++",),
    ),
    Mutant(
        "do not wait for a gather that is given up",
        "csrc/group/full_copies.cpp",
        "!pending || pending->settle()",
        "true",
        languages=("C++",),
    ),
    Mutant(
        "free full copies that are being gathered",
        "csrc/group/full_copies.cpp",
        "  // After one that failed the buffer may still be written to: it does not go back.\n",
        "  for (auto& storage : storages_) storage.free();\n",
        languages=("C++",),
    ),
    Mutant(
        "keep what was gathered while the optimizer wrote",
        "csrc/group/full_copies.cpp",
        "return stale_;",
        "return false;",
        languages=("C++",),
    ),
]
