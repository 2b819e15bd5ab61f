"""The demo, shortened: it trains in both languages, checks itself against one process, and draws a picture."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT, python

FRONTS = ("cpp", "python")
RANKS, STEPS = 2, 12


@dataclass
class Demo:
    out: Path
    done: subprocess.CompletedProcess[str]

    @classmethod
    def run(cls, out: Path, *arguments: str) -> Demo:
        return cls(out, python(ROOT / "examples" / "demo.py", "--short", "--ranks", RANKS, "--out", out, *arguments))

    def losses(self, rank: int) -> list[float]:
        return [json.loads(line)["loss"] for line in (self.out / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> dict[str, Demo]:
    return {front: Demo.run(tmp_path_factory.mktemp(front), "--front", front) for front in FRONTS}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Demo:
    return Demo.run(tmp_path_factory.mktemp("sharded"), "--mode", "fully_shard")


@pytest.mark.parametrize("front", FRONTS)
def test_trains_and_agrees_with_one_process(demos, front):
    done = demos[front].done
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-04): passed" in done.stdout
    for unit in ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "(root)"]:
        assert f"\n{unit} " in done.stdout, "the plan has a row for every unit"
    (last,) = [line for line in done.stdout.splitlines() if line.startswith(f"step {STEPS}/{STEPS} ")]
    assert all(part in last for part in ["loss ", "tokens/s", " | ", "MiB"])
    losses = [demos[front].losses(rank) for rank in range(RANKS)]
    assert losses[0] != losses[1], "each rank has its own batches"
    assert all(sum(rank[-3:]) < sum(rank[:3]) - 1 for rank in losses), "it learns"


@pytest.mark.parametrize("front", FRONTS)
def test_picture_has_a_loss_and_a_memory_line_for_each_rank(demos, front):
    lines = read_lines(demos[front].out / "training.svg")
    assert set(lines) == {(kind, str(rank)) for kind in ("loss", "memory") for rank in range(RANKS)}
    assert all(len(points) == STEPS for points in lines.values())
    for rank in range(RANKS):
        losses = demos[front].losses(rank)
        heights = [y for _, y in lines["loss", str(rank)]]
        assert heights.index(min(heights)) == losses.index(max(losses)), "the highest point is the largest loss"
    (told,) = re.findall(r"^picture  (.+)$", demos[front].done.stdout, re.MULTILINE)
    assert Path(told).resolve() == demos[front].out / "training.svg"


def test_fully_shard_trains_and_agrees_with_one_process(demos, sharded):
    done = sharded.done
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-04): passed" in done.stdout
    first = done.stdout[: done.stdout.index("A few steps with replicate")]
    for unit in ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "(root)"]:
        assert re.search(rf"^{re.escape(unit)} +fully_shard ", first, re.MULTILINE)
    for rank in range(RANKS):
        assert sharded.losses(rank) == pytest.approx(demos["cpp"].losses(rank), rel=1e-4)
    assert "A byte-level GPT sharded over 2 ranks from C++" in (sharded.out / "training.svg").read_text()


def test_memory_of_both_modes_is_told(demos, sharded):
    for demo in (demos["cpp"], sharded):
        numbers = {mode: re.findall(rf"^{mode} ((?: +[-\d.]+){{6}})$", demo.done.stdout, re.MULTILINE)
                   for mode in ("replicate", "fully_shard")}  # fmt: skip
        everywhere, shard = ([float(number) for number in numbers[mode][0].split()] for mode in numbers)
        whole = json.loads((demo.out / "run.json").read_text())["parameters"] * 4 / 2**20
        # Parameters, gradients and the optimizer's. Buckets have gaps between gradients, and a count for each.
        for place, size in enumerate((whole, whole, 2 * whole)):
            assert everywhere[place] == pytest.approx(size, rel=0.02)
            assert shard[place] == pytest.approx(size / RANKS, rel=0.02)
        # A half of everything, and of four blocks the pool keeps the full copies of two, a gather and a bucket.
        assert shard[4] < 0.8 * everywhere[4] and shard[5] < everywhere[5]


def test_three_dimensions_agree_with_one_process(tmp_path):
    demo = Demo.run(tmp_path, "--mode", "3d", "--ranks", "8")
    assert demo.done.returncode == 0, demo.done.stdout + demo.done.stderr
    assert "(limit 1e-04): passed" in demo.done.stdout
    # The plan, the stages, and what each rank waits for and holds.
    for text in ("blocks.1.qkv.weight: [576, 192], here [288, 192]", "\nrank 0: 0F0 ", "it would wait for 33 %."):
        assert text in demo.done.stdout
    waits = re.findall(r"^rank \d +([01])  [01]  [01] +(\d+) %(?: +[\d.]+){5}$", demo.done.stdout, re.MULTILINE)
    assert [stage for stage, _ in waits] == ["0"] * 4 + ["1"] * 4
    assert all(0 < int(share) < 100 for _, share in waits)
    assert [demo.losses(rank) for rank in range(8)] == [demo.losses(0)] * 8
    whole = json.loads((demo.out / "run.json").read_text())["parameters"]
    assert whole == 1_902_976


def test_both_languages_train_the_same(demos):
    for rank in range(RANKS):
        assert demos["python"].losses(rank) == pytest.approx(demos["cpp"].losses(rank), rel=1e-4)


def test_fails_when_one_process_trains_otherwise(tmp_path):
    done = Demo.run(tmp_path, "--reference-seed", "2").done
    assert done.returncode == 1
    assert "(limit 1e-04): FAILED" in done.stdout
    assert done.stderr.endswith("demo: the ranks did not train as one process would.\n")


def test_fails_when_the_ranks_fail(tmp_path):
    done = Demo.run(tmp_path, "--binary", "/bin/false").done
    assert done.returncode == 1
    assert "demo: the command above ended with exit code" in done.stderr


def read_lines(file: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The points of the lines that belong to a rank, by kind and rank."""
    lines = {}
    for line in ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}polyline"):
        if "data-rank" in line.attrib:
            points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
            lines[line.attrib["class"], line.attrib["data-rank"]] = points
    return lines
