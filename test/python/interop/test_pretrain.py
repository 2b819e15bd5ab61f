"""examples/cpp/pretrain: a run whose ranks are killed goes on by itself, with the losses of one undisturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import BUILD
from form import by_form

PROGRAM = BUILD / "examples" / "cpp" / "pretrain"


def start(out: Path, ranks: int, steps: int) -> subprocess.Popen[str]:
    out.mkdir(exist_ok=True)
    text = out.parent / "text"
    text.write_bytes(b"".join(b"%d bottles of beer on the wall, " % (number * number) for number in range(4000)))
    launcher = "-m torch.distributed.run --no-python --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --max-restarts 3"
    options = {"text": text, "out": out, "steps": steps, "every": 4, "batch": 8}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, *launcher.split(), "--nproc-per-node", str(ranks), str(PROGRAM), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(run: subprocess.Popen[str]) -> str:
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    return output


def losses(out: Path) -> dict[int, float]:
    """Of each step, the last that was logged."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for_first_checkpoint(run: subprocess.Popen[str], out: Path) -> None:
    """It appears while training goes on, before the next one begins four steps later."""
    deadline = time.monotonic() + 200
    while not (out / "checkpoints" / "step-4").exists():
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.01)


@pytest.mark.parametrize("victim", by_form((0,), (0, 1)))
def test_a_killed_rank_changes_nothing(victim: int, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(straight, ranks=2, steps=24))
    expected = losses(straight)
    assert list(expected) == list(range(1, 25)) and expected[24] < 0.8 * expected[1]

    run = start(killed, ranks=2, steps=24)
    wait_for_first_checkpoint(run, killed)
    os.kill(sorted(children(run.pid))[victim], signal.SIGKILL)
    assert "goes on after step" in finish(run)
    # To the bit, for the ranks are as many.
    assert losses(killed) == expected

    # Twice as many ranks have other sums, but the same batches.
    shutil.rmtree(killed / "checkpoints" / "step-24")
    (killed / "log.jsonl").unlink()
    assert "goes on after step 20 on 4 ranks" in finish(start(killed, ranks=4, steps=24))
    expected = {step: expected[step] for step in range(21, 25)}
    assert losses(killed) == pytest.approx(expected, rel=2e-2)
