"""Twenty restarts in a row, each because a rank was killed at some time: the last life goes on where others ended."""

from __future__ import annotations

import json
from pathlib import Path

from checkout import ROOT, torchrun

HERE = Path(__file__).resolve().parent
EXAMPLE = ROOT / "examples" / "python" / "resume.py"
OURS = {"SHARDWISE_INSTALL": "1"}
LIVES = 20


def losses_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "rank1.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


# Over torch's own Gloo a new life may wait for addresses of the one before, in init_process_group() itself.
def test_ranks_are_killed_twenty_times_and_train_on(tmp_path: Path) -> None:
    folder, whole = tmp_path / "interrupted", tmp_path / "whole"
    for each in (folder, whole):
        each.mkdir()
    restarts = ("--max-restarts", LIVES, "--monitor-interval", 0.2)
    out = torchrun(2, *restarts, HERE / "killed.py", LIVES, folder, **OURS)
    starts = [int(line.rpartition(" ")[2]) for line in out.splitlines() if "shardwise" in line and "after step" in line]
    assert starts == sorted(starts), out
    assert len(set(starts)) > 3, f"the ranks were killed before they could train: {starts}"
    losses = losses_of(folder)
    assert sorted(losses) == list(range(starts[-1] + 1, starts[-1] + 11))
    words = ("--checkpoints", whole, "--every", 1000000, "--out", whole, "--steps", max(losses))
    torchrun(2, EXAMPLE, *words, **OURS)
    uninterrupted = losses_of(whole)
    assert losses == {step: uninterrupted[step] for step in losses}
