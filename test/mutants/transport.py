"""How the direct transport gathers, sums, compares and fails."""

from __future__ import annotations

from mutant import Mutant

_SUITES = "Transport.*:TransportArithmetic.*"
_SAME_HOST = "SameHost.*:TransportSameHost.*:TransportArithmetic.*"

TRANSPORT = [
    Mutant(
        "take one's own values for those of the other of two ranks",
        "csrc/comm/direct_wire_exchange.cpp",
        "    terms[peer] = place;\n",
        "",
        suites="TransportArithmetic.Direct",
    ),
    Mutant(
        "add up in the order of arrival at each rank",
        "csrc/comm/direct_wire_exchange.cpp",
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
        "leave out what is left of a sum after whole blocks",
        "csrc/comm/direct_sums.cpp",
        "  if (whole < elements) add_block(whole,",
        "  if (whole > elements) add_block(whole,",
        suites=_SUITES,
    ),
    Mutant(
        "sum a piece before it has come from all ranks",
        "csrc/comm/direct_wire_exchange.cpp",
        "    wire().wait(coming[number % kPieces]);",
        "    wire().wait(coming[number % kPieces].front());",
        suites=_SUITES,
    ),
    Mutant(
        "receive a piece over one that is not summed yet",
        "csrc/comm/direct_wire_exchange.cpp",
        "return pieces_.data() + (number % kPieces * world + peer) * piece;",
        "return pieces_.data() + (number % 2 * world + peer) * piece;",
        suites=_SUITES,
    ),
    Mutant(
        "write a later piece to the beginning of its span",
        "csrc/comm/direct_spans.cpp",
        "std::copy_n(from, here, place + offset);",
        "std::copy_n(from, here, place);",
        suites=_SUITES,
    ),
    Mutant(
        "compare no calls",
        "csrc/comm/direct_exchange.cpp",
        "  if (theirs == mine) return;",
        "  if (theirs.kind == mine.kind) return;",
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
    Mutant(
        "give memory back that a peer still reads",
        "csrc/comm/same_host_exchange.cpp",
        "    sum(call, output, *terms, bytes);\n    if (bytes <= kInline) return;\n    steps_.take_and_wait();",
        "    steps_.take_and_wait();\n    sum(call, output, *terms, bytes);\n    if (bytes <= kInline) return;",
        suites=_SAME_HOST,
    ),
    Mutant(
        "copy the sum of a peer before it is there",
        "csrc/comm/same_host_exchange.cpp",
        "    sum(call, data + mine.begin, *terms, mine.bytes);\n    steps_.take_and_wait();",
        "    sum(call, data + mine.begin, *terms, mine.bytes);\n    steps_.take();",
        suites=_SAME_HOST,
    ),
    Mutant(
        "write to the stage that peers read from",
        "csrc/comm/same_host_board.h",
        "2 * announcement() + (piece % 2) * kStage;",
        "2 * announcement() + (piece % 1) * kStage;",
        suites=_SAME_HOST,
    ),
    Mutant(
        "take a process that was killed for one that is late",
        "csrc/comm/same_host_peer.cpp",
        "  return poll(&end, 1, 0) <= 0;",
        "  return poll(&end, 1, 0) <= 1;",
        suites=_SAME_HOST,
    ),
    Mutant(
        "end without a word to the peers",
        "csrc/comm/same_host_exchange.cpp",
        "    if (course.broken()) steps_.end();",
        "",
        suites=_SAME_HOST,
    ),
    Mutant(
        "share memory although one rank does not want it",
        "csrc/comm/same_host_members.cpp",
        "wanted ? Arena::of_this_process() : nullptr",
        "wanted || true ? Arena::of_this_process() : nullptr",
        suites=_SAME_HOST,
    ),
    Mutant(
        "share memory with processes of another host",
        "csrc/comm/same_host_members.cpp",
        " && other.host == cards.front().host;",
        ";",
        suites=_SAME_HOST,
    ),
    Mutant(
        "give memory back of the process that this one was forked from",
        "csrc/comm/same_host_arena.cpp",
        "  if (!is_of_this_process()) return;",
        "",
        suites=_SAME_HOST,
    ),
]
