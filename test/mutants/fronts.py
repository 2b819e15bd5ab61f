"""The front ends of torch::nn: hooks, touch, clipping, states, checkpoints."""

from __future__ import annotations

from mutant import Mutant

FRONTS = [
    Mutant(
        "hooks do not enter",
        "csrc/nn/hooks/unit_hooks.cpp",
        "      self->enter(engine::Keep::outer);\n    } else {",
        "    } else {",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "hooks do not leave",
        "csrc/nn/hooks/unit_hooks.cpp",
        "    self->leave();\n",
        "",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "hooks do not see the backward begin",
        "csrc/nn/hooks/unit_hooks.cpp",
        "    if (c10::GradMode::is_enabled()) watch_outputs(outputs, weak);\n",
        "    if (outputs.empty()) watch_outputs(outputs, weak);\n",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "see no touch",
        "csrc/nn/touch/unit_touch.cpp",
        "  if (test_switches().touch) add_touch_key(tensor);",
        "  (void)tensor;",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "see no write to a shard",
        "csrc/nn/touch/unit_touch.cpp",
        "    owner->shard_written();\n",
        "",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "clip by the norm of this rank alone",
        "csrc/nn/state/clip_grad_norm.cpp",
        "    if (!meshes.empty()) part.reduce(*meshes[i]);\n",
        "",
        suites="FullyShardClip.*",
    ),
    Mutant(
        "count on every rank what all have whole",
        "csrc/nn/state/clip_grad_norm.cpp",
        "part.add(gradient, share);",
        "part.add(gradient, share > 0 ? 1 : 0);",
        suites="FullyShardClip.*",
    ),
    Mutant(
        "load the values of rank 1",
        "csrc/engine/unit_ranks.cpp",
        "axis.broadcast(tensor, 0, what, counters)",
        "axis.broadcast(tensor, 1, what, counters)",
        suites="FullyShardStateDictLoad.*",
    ),
    Mutant(
        "load no buffers",
        "csrc/nn/state/load_state_dict.cpp",
        "  target.copy_(piece);",
        "  if (entry.unit) target.copy_(piece);",
        suites="FullyShardStateDictLoad.*",
    ),
    Mutant(
        "keep full copies of what was loaded over",
        "csrc/group/full_copies_values.cpp",
        "  shard.copy_(piece);\n  mark_stale();\n",
        "  shard.copy_(piece);\n",
        suites="FullyShardFront.*",
    ),
    Mutant(
        "give the buffers themselves in a full state",
        "csrc/nn/state/full_state_dict.cpp",
        "tensor.to(*device) : tensor.clone();",
        "tensor.to(*device) : tensor;",
        suites="FullyShardStateDict.*",
    ),
    Mutant(
        "draw other random numbers in the second run of a checkpoint",
        "csrc/nn/recompute/checkpoint_node.cpp",
        "  if (random_) random.emplace(*random_);\n",
        "",
        suites="Checkpoint*",
    ),
    Mutant(
        "run a checkpoint again without the autocast of its forward",
        "csrc/nn/recompute/checkpoint_node.cpp",
        "  const c10::AutoGradMode with_gradients(true);\n  const AutocastGuard autocast(autocast_);\n",
        "  const c10::AutoGradMode with_gradients(true);\n",
        suites="Checkpoint*",
    ),
]
