"""What programs hold and do around wrapping and training, in C++."""

from __future__ import annotations

from mutant import BOTH, Mutant

TRAPS = [
    Mutant(
        "take what a container hands out for a member's",
        "csrc/nn/owners.cpp",
        "named || found.handed_out || (found.known && !by_member)",
        "named || (found.known && !by_member)",
        suites="HeldParameters.*",
    ),
    Mutant(
        "let each rank alone see that nothing holds a parameter",
        "csrc/engine/unit_making.cpp",
        "  if (world > 1) unheld = any_of_ranks(unheld, ranks_.axes(), mesh_.device(), counters_);\n",
        "",
        suites="HeldParameters.*",
    ),
    Mutant(
        "see no alias of a parameter",
        "csrc/nn/aliases.cpp",
        "(strangers || overlaps)",
        "((strangers && false) || overlaps)",
        suites="Aliases.*",
    ),
    Mutant(
        "let old full copies be read by their pointer",
        "csrc/group/full_copies.cpp",
        "    for (auto& storage : storages_) storage.expire();\n",
        "",
        suites="RawReads.*",
    ),
    Mutant(
        "let an optimizer of full copies do nothing",
        "csrc/group/parameter.cpp",
        "  if (!gradient.defined()) gradient = absent_;\n",
        "  if (!gradient.defined()) gradient = at::Tensor();\n",
        suites="Traps.*",
    ),
    Mutant(
        "scale gradients by a number of this rank alone",
        "csrc/nn/unit_touch.cpp",
        "if (owner && touch.written && touch.local == Local::number)",
        "if (owner && touch.written && touch.local > Local::number)",
        suites="Traps.*",
    ),
    Mutant(
        "thaw members that a program froze",
        "csrc/group/parameter.cpp",
        "shard->requires_grad() == trained_ && leaf_requires_grad() != trained_",
        "shard->requires_grad() != trained_ && leaf_requires_grad() != trained_",
        suites="Traps.*",
    ),
    Mutant(
        "leave it to torch to say that sizes differ",
        "csrc/nn/shard_errors.cpp",
        '  if (shard == whole || !has_whole) return "";',
        '  if (shard == whole || has_whole) return "";',
        suites="Traps.*",
    ),
    Mutant(
        "wrap pieces that were loaded into a plain module",
        "csrc/nn/loaded_pieces.cpp",
        "weight.storage().nbytes() > weight.nbytes();",
        "weight.storage().nbytes() < weight.nbytes();",
        suites="Traps.*",
    ),
    Mutant(
        "say more than once that a reason is given",
        "csrc/base/reason.cpp",
        '  replace_all(text, ". Details: ", ". ");\n',
        "",
        suites="Errors.*",
    ),
    Mutant(
        "give the sum for the mean of a mesh",
        "csrc/comm/mesh_values.cpp",
        "sum.div_(static_cast<double>(size()))",
        "sum",
        suites="MeshValues.*",
    ),
    Mutant(
        "let several threads use a model",
        "csrc/engine/turn.h",
        '      refuse(unit, holder, "uses");\n',
        "",
        suites="Threads.*",
        languages=BOTH,
    ),
    Mutant(
        "let two threads run backwards of a model",
        "csrc/engine/schedule.cpp",
        "    if (backward_thread_ != std::this_thread::get_id() && !is_on_device()) {\n",
        "    if (false) {\n",
        suites="Threads.*",
    ),
    Mutant(
        "serve what a gather that failed left",
        "csrc/group/full_copies.cpp",
        "  } catch (...) {\n    drop_gather(buffers, counters);\n",
        "  } catch (...) {\n",
        suites="Threads.*",
    ),
    Mutant(
        "free units whose forward runs",
        "csrc/engine/order.cpp",
        "if (node.timing.reshard_after_backward && !node.in_forward)",
        "if (node.timing.reshard_after_backward)",
        languages=("Python",),
    ),
]
