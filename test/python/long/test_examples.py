"""Programs for torch, started as docs/from-fsdp2.md shows: with its engine and with ours they print the same losses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import PACKAGES, ROOT, python

COMMAND = (
    r"^SHARDWISE_INSTALL=1 python (-m torch\.distributed\.run .*?--nproc-per-node (\d+) examples/python/(\w+)\.py.*)$"
)

#: What the page tells to start: script, ranks, and what follows `python`.
SHOWN = [
    (script, int(ranks), shlex.split(words))
    for words, ranks, script in re.findall(COMMAND, (ROOT / "docs" / "from-fsdp2.md").read_text(), re.MULTILINE)
]
WHO = {False: "torch.distributed.", True: "shardwise._"}


@dataclass
class Run:
    """What a program printed, and the losses of each rank that told some."""

    text: str
    losses: dict[int, list[float]]


@dataclass
class Programs:
    """Runs the programs in a folder, on a Python that seems to have the package installed."""

    folder: Path

    def run(self, number: int, *arguments: str, ours: bool, first: int = 1, last: int) -> Run:
        """The command `number` of the page, with other arguments after its own: steps `first` to `last`."""
        script, ranks, words = SHOWN[number]
        out = self.folder / f"{script}-{ranks}-{WHO[ours]}"
        out.mkdir()

        def start() -> subprocess.CompletedProcess[str]:
            variables = {"PYTHONPATH": str(self.folder), "SHARDWISE_INSTALL": str(int(ours))}
            return python(*words, "--out", out, "--steps", last, *arguments, **variables)

        done = start()
        if not ours and "terminate called without an active exception" in done.stderr:
            # Seen once on a busy machine: a process without anything of ours, at its very end.
            assert f"step {last:3}  loss" in done.stdout, done.stdout + done.stderr
            if first == 1:
                shutil.rmtree(self.folder / f"checkpoints-{ours}", ignore_errors=True)
            done = start()
        assert done.returncode == 0, done.stdout + done.stderr
        said = [line for line in done.stderr.splitlines() if "shardwise: " in line]
        told = "shardwise: as SHARDWISE_INSTALL says, these are shardwise's, not torch's: "
        assert len(said) == int(ours) and all(line.startswith(told) for line in said), done.stderr
        assert done.stdout.startswith(WHO[ours]), done.stdout
        losses = {}
        for rank in range(ranks):
            records = [json.loads(line) for line in (out / f"rank{rank}.jsonl").read_text().splitlines()]
            if records:
                assert [record["step"] for record in records] == list(range(first, last + 1))
                losses[rank] = [record["loss"] for record in records]
        assert f"step {last:3}  loss {min(losses.items())[1][-1]:.4f}\n" in done.stdout
        return Run(done.stdout, losses)


@pytest.fixture
def programs(tmp_path) -> Programs:
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(PACKAGES)!r})\n")
    return Programs(tmp_path)


def test_the_page_starts_each_program() -> None:
    assert [(script, ranks) for script, ranks, _ in SHOWN] == [
        ("hsdp", 4), ("pipeline", 8), ("resume", 2), ("resume", 4),
    ]  # fmt: skip


def test_hsdp_with_mixed_precision(programs) -> None:
    theirs, ours = (programs.run(0, ours=ours, last=6) for ours in (False, True))
    # All sums are of two ranks, and so are the same in any order.
    assert ours.losses == theirs.losses
    assert len({tuple(losses) for losses in ours.losses.values()}) == 4, "each rank has its own batches"
    assert all(losses[-1] < losses[0] - 0.5 for losses in ours.losses.values()), "it learns"


def test_pipeline_of_replicas_with_tensor_parallelism(programs) -> None:
    theirs, ours = (programs.run(1, ours=ours, last=4) for ours in (False, True))
    # All sums are of two ranks here, too.
    assert ours.losses == theirs.losses
    assert sorted(ours.losses) == [4, 5, 6, 7], "the last stage has losses"
    assert ours.losses[4] == ours.losses[5] != ours.losses[6] == ours.losses[7], "replicas have their own batches"
    assert ours.losses[4][-1] < ours.losses[4][0] - 0.5, "it learns"


def test_resumes_on_another_number_of_ranks(programs, tmp_path) -> None:
    """Each engine goes on from a checkpoint of the other."""
    saved = {ours: tmp_path / f"checkpoints-{ours}" for ours in (False, True)}
    whole = {
        ours: programs.run(2, "--every", "3", "--checkpoints", str(saved[ours]), ours=ours, last=6)
        for ours in (False, True)
    }
    assert whole[True].losses == whole[False].losses
    for folder in saved.values():
        assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000006"]
        shutil.rmtree(folder / "step-000006")
    resumed = {
        ours: programs.run(3, "--checkpoints", str(saved[not ours]), ours=ours, first=4, last=6)
        for ours in (False, True)
    }
    for run in resumed.values():
        assert "after step 3\n" in run.text
        # Four ranks add up in another order than two.
        assert run.losses[0] == pytest.approx(whole[False].losses[0][3:], rel=1e-5)
        assert all(losses == run.losses[0] for losses in run.losses.values()), "the loss is that of all ranks"
    # And the engines may, too.
    assert resumed[True].losses[0] == pytest.approx(resumed[False].losses[0], rel=1e-6)
    assert whole[True].losses[0][-1] < whole[True].losses[0][0] - 0.5, "it learns"
