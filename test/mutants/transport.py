"""How the direct transport gathers, sums, compares and fails."""

from __future__ import annotations

from mutant import Mutant

_SUITES = "Transport.*:TransportArithmetic.*"

TRANSPORT = [
    Mutant(
        "add up in the order of arrival at each rank",
        "csrc/comm/direct_exchange.cpp",
        "terms.push_back(peer == rank() ? own : announcements_.data(peer));",
        "terms.insert(peer == rank() ? terms.begin() : terms.end(), peer == rank() ? own : announcements_.data(peer));",
        suites=_SUITES,
    ),
    Mutant(
        "round 16-bit sums after each term",
        "csrc/comm/direct_sums.cpp",
        "      return add_up_as<c10::BFloat16, float>(output, terms, elements, mean);",
        "      return add_up_as<c10::BFloat16, c10::BFloat16>(output, terms, elements, mean);",
        suites=_SUITES,
    ),
    Mutant(
        "sum a piece before it has come from all ranks",
        "csrc/comm/direct_exchange.cpp",
        "    wire_.wait(coming[number % kPieces]);",
        "    wire_.wait(coming[number % kPieces].front());",
        suites=_SUITES,
    ),
    Mutant(
        "receive a piece over one that is not summed yet",
        "csrc/comm/direct_exchange.cpp",
        "return pieces_.data() + (number % kPieces * world + peer) * piece;",
        "return pieces_.data() + (number % 2 * world + peer) * piece;",
        suites=_SUITES,
    ),
    Mutant(
        "compare no calls",
        "csrc/comm/direct_announcements.cpp",
        "    if (theirs == signature) continue;",
        "    if (theirs.kind == signature.kind) continue;",
        suites=_SUITES,
    ),
    Mutant(
        "leave means of 16 bits to Gloo",
        "csrc/comm/direct_rule.h",
        "(half && op == c10d::ReduceOp::SUM)",
        "half",
        suites=_SUITES,
    ),
    Mutant(
        "do not end the wait of a transport that is shut down",
        "csrc/comm/direct_wire.cpp",
        "  if (waited_for_) waited_for_->abort();",
        "",
        suites=_SUITES,
    ),
    Mutant(
        "forget the timeout of a call",
        "csrc/comm/direct_backend.cpp",
        "  return given > std::chrono::milliseconds(0) ? given : timeout_.load();",
        "  return given > std::chrono::minutes(1) ? given : timeout_.load();",
        suites=_SUITES,
    ),
    Mutant(
        "give users the transport's own tags",
        "csrc/comm/direct_handed_over.cpp",
        "  if (tag >= 0 && tag < kFirstTag) return;",
        "  if (tag >= 0) return;",
        suites=_SUITES,
    ),
]
