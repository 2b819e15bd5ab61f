"""What is gathered ahead of its use, and the memory that units take turns in."""

from __future__ import annotations

from mutant import Mutant

SUITES = "FullyShardPrefetch.*"

AHEAD = [
    Mutant(
        "gather ahead although a list says what",
        "csrc/engine/order.cpp",
        "!prefetches || has_list",
        "!prefetches",
        suites=SUITES,
    ),
    Mutant(
        "gather ahead although that is turned off",
        "csrc/engine/order.cpp",
        "is_by_hand(*next) || !prefetches",
        "is_by_hand(*next)",
        suites=SUITES,
    ),
    Mutant(
        "gather ahead what the user gathered in this forward",
        "csrc/engine/order.cpp",
        "!units_[*next].alive || is_by_hand(*next)",
        "!units_[*next].alive",
        suites=SUITES,
    ),
    Mutant(
        "go by a use of what the user gathered",
        "csrc/engine/order.cpp",
        "by_hand ? begins : gathered",
        "by_hand || gathered",
        suites=SUITES,
    ),
    Mutant(
        "see no forward begin with a root that the user gathered",
        "csrc/engine/order.cpp",
        "by_hand && !units_[unit].outer",
        "false",
        suites=SUITES,
    ),
    Mutant(
        "keep one order for forwards with and without gradients",
        "csrc/engine/order.cpp",
        "infers ? inference_ : training_",
        "training_",
        suites=SUITES,
    ),
    Mutant(
        "see no forward come round",
        "csrc/engine/order.cpp",
        "infers && order.comes_round(unit)",
        "false",
        suites=SUITES,
    ),
    Mutant(
        "see no forward end with the call of the root",
        "csrc/engine/order.cpp",
        "  if (is_outermost) end_forwards();\n",
        "",
        suites=SUITES,
    ),
    Mutant(
        "go on with the order of a backward that failed",
        "csrc/engine/order_backward.cpp",
        "  backwards_.forget_pass();\n",
        "",
        suites=SUITES,
    ),
    Mutant(
        "lose the place in the order where a unit is left out",
        "csrc/engine/pass_order.h",
        "if (found != before_.end()) next_",
        "if (next() != nullptr && *next() == use) next_",
        suites=SUITES,
    ),
    Mutant(
        "give the memory of full copies back while they are there",
        "csrc/group/full_copies.cpp",
        "  size_t offset = 0;\n",
        "  buffers.give(memory_);\n  size_t offset = 0;\n",
        suites="FullyShardPrograms.*",
    ),
    Mutant(
        "lay full copies over each other",
        "csrc/group/full_copies.cpp",
        "    offset += layout::aligned(storage.bytes());\n",
        "",
        suites="FullyShardPrograms.*",
    ),
]
