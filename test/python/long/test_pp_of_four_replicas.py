"""A pipeline of two stages and four replicas."""

from __future__ import annotations

from test_pp_composability import replicate_pp

from shardwise.testing import run_ranks


def test_replicate_pp_of_four() -> None:
    run_ranks(8, replicate_pp, ["Interleaved1F1B"], timeout=240)
