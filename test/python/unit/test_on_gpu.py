"""`make gpu`: its table, what it runs again, and that nothing that goes wrong, or is missing, counts as passed."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import tarfile
import time
from pathlib import Path

import on_gpu
import on_gpu_steps as steps
import pytest
import torch
from reports import FAILED, PASSED, SKIPPED, Result


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs steps of these outcomes, and gives the exit status, the table by step and the steps that really ran."""
    facts = {name: name for name in ("machine", "GPU", "driver", "torch", "NCCL", "date")}

    def ran(outcomes, *words, commit="commit"):
        began = []

        def act(place):
            began.append(place.step)
            if isinstance(outcomes[place.step], Exception):
                raise outcomes[place.step]
            return steps.Outcome(*outcomes[place.step])

        monkeypatch.setattr(on_gpu, "facts_of", lambda device: {**facts, "commit": commit})
        stages = [[steps.Step(name, f"about {name}", 60, act)] for name in outcomes]
        status = on_gpu.main([*words, "--folder", str(tmp_path)], stages)
        shown = capsys.readouterr().out.partition("\nstep ")[2].splitlines()[1:]
        return status, {line.split()[0]: " ".join(line.split()[1:]) for line in shown}, began

    return ran


GOOD, BAD, LACKING = (PASSED, "3 passed"), (FAILED, "1 failed: A.b"), (steps.MISSING, "torch finds no GPU here")


def test_the_table_tells_what_came_of_each_step(run, tmp_path):
    status, table, began = run(
        {"good": GOOD, "lacking": LACKING, "bad": BAD, "broken": OSError("no disk"), "last": GOOD}
    )
    assert status == 1
    assert began == ["good", "lacking", "bad", "broken", "last"]
    assert table["good"] == "passed 0 3 passed"
    assert table["lacking"] == "missing 0 torch finds no GPU here"
    assert table["bad"] == "failed 0 1 failed: A.b"
    assert table["broken"] == "failed 0 OSError: no disk"
    written = json.loads((tmp_path / "bad.json").read_text())
    assert (written["result"], written["facts"]["GPU"]) == (FAILED, "GPU")


def test_what_has_passed_is_not_run_again_unless_asked(run, tmp_path):
    outcomes = {"good": GOOD, "bad": BAD, "lacking": LACKING}
    run(outcomes)
    status, table, began = run({**outcomes, "bad": GOOD})
    assert began == ["bad", "lacking"]
    assert (status, table["good"], table["bad"]) == (0, "passed 0 3 passed", "passed 0 3 passed")
    assert run(outcomes, "--again")[2] == ["good", "bad", "lacking"]
    assert run(outcomes, "good", "--again")[2] == ["good"]
    (tmp_path / "good.json").write_text('{"step": "good", "resu')
    assert "good" in run(outcomes)[2]
    assert "good" in run(outcomes, commit="another")[2]
    with pytest.raises(SystemExit, match="there is no step wrong"):
        run(outcomes, "wrong")


def test_skipped_tests_alone_have_not_passed():
    skipped = Result("s", "", "A.b", SKIPPED, "graph_test.cpp:9\na CUDA graph needs a GPU")
    assert steps.outcome_of([skipped]) == steps.Outcome(steps.MISSING, "a CUDA graph needs a GPU")
    assert steps.outcome_of([]).result == steps.MISSING
    assert steps.outcome_of([skipped, Result("s", "", "A.c", PASSED)]).result == PASSED
    assert steps.outcome_of([Result("s", "", "A.c", PASSED)], "it crashed") == steps.Outcome(
        FAILED, "1 passed, 0 failed, 0 skipped: it crashed"
    )


PROGRAM = """#!/bin/sh
LISTED='A.\\n  one\\n  two  # GetParam() = 3\\nB/0.  # TypeParam = int\\n  three\\n  DISABLED_off\\n'
case "$1" in --gtest_list_tests) printf "$LISTED"; exit;; esac
begin() { case "$FILTER" in *$1*) echo "[ RUN      ] $1"; true;; *) false;; esac; }
FILTER=$1
begin A.one && echo "[       OK ] A.one (3 ms)"
begin A.two && echo "something is wrong" && kill -ABRT $$
begin B/0.three && printf 'words[  SKIPPED ] B/0.three (0 ms)\\n'
exit 0
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "tests"
    file.write_text(PROGRAM)
    file.chmod(0o755)
    return file


def test_a_test_that_ends_the_program_does_not_end_the_others(program, tmp_path):
    tests = steps.tests_of(program, "*", {})
    assert tests == ["A.one", "A.two", "B/0.three"]
    log = tmp_path / "log"
    found = steps.run_tests("rank", program, tests, log, time.monotonic() + 60, {})
    assert [(result.name, result.outcome) for result in found] == [
        ("A.one", PASSED),
        ("A.two", FAILED),
        ("B/0.three", SKIPPED),
    ]
    assert found[1].message == "it ended the program\nsomething is wrong"


def test_what_was_not_reached_has_failed(program, tmp_path):
    found = steps.run_tests("rank", program, ["A.one"], tmp_path / "log", time.monotonic() - 1, {})
    assert [(result.name, result.outcome) for result in found] == [("A.one", FAILED)]
    program.write_text("#!/bin/sh\nexit 3\n")
    found = steps.run_tests("rank", program, ["A.one"], tmp_path / "log", time.monotonic() + 60, {})
    assert found[0].message == "it ended with status 3 before a test began"


def test_what_the_build_left_out_is_told_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "BUILD", tmp_path)
    (tmp_path / "build.ninja").write_text("USE_C10D_NCCL")
    place = steps.Place("build_has_cuda", "cuda", tmp_path)
    assert "our kernels left out: the build said why" in steps.cuda_support(place).said
    (tmp_path / "CMakeCache.txt").write_text("A:INTERNAL=b\nSHARDWISE_WITHOUT_KERNELS:INTERNAL=there is no nvcc\n")
    assert "our kernels left out: there is no nvcc" in steps.cuda_support(place).said
    (tmp_path / "build.ninja").write_text("USE_C10D_NCCL kernels.cu.o")
    assert steps.cuda_support(place).result == PASSED


#: Stands before torch's own NCCL, which has all the rest.
OTHER_NCCL = """
#include <dlfcn.h>
__attribute__((constructor)) void start(void) { dlopen(TORCHS, RTLD_NOW | RTLD_GLOBAL); }
int ncclGetVersion(int* version) { *version = 91234; return 0; }
"""


@pytest.fixture
def other_nccl(tmp_path):
    (tmp_path / "nccl.c").write_text(OTHER_NCCL)
    library = tmp_path / "libnccl.so.2"
    torchs = Path(torch.__file__).parents[1] / "nvidia/nccl/lib/libnccl.so.2"
    words = [f'-DTORCHS="{torchs}"', f"-Wl,-soname,{library.name}", "-shared", "-fPIC"]
    subprocess.run(["c++", "-x", "c", *words, tmp_path / "nccl.c", "-o", library], check=True)
    return library


def test_the_version_of_nccl_is_that_of_the_one_that_is_loaded(other_nccl):
    assert steps.Gpus.found({**os.environ, "LD_PRELOAD": str(other_nccl)}).nccl == (9, 12, 34)


def test_an_nccl_of_the_kit_is_named_beside_that_of_torch(monkeypatch, tmp_path):
    def found(environment=()):
        return steps.Gpus(1, (2, 30, 7) if "LD_PRELOAD" in environment else (2, 28, 9))

    monkeypatch.setattr(steps.Gpus, "found", found)
    for nccl, said in ((tmp_path, "2.28.9 (2.30.7 where ranks share a GPU)"), (tmp_path / "none", "2.28.9")):
        steps.gpus.cache_clear()
        monkeypatch.setattr(steps, "NCCL", nccl)
        assert on_gpu.nccl_versions() == said
    steps.gpus.cache_clear()


def test_logs_are_saved_with_their_ends_and_pictures_whole(tmp_path):
    log = base64.b64encode(random.Random(1).randbytes(300_000)).decode()
    for number in range(80):
        (tmp_path / f"{number}.log").write_text(f"{log[number:]} end of {number}")
    (tmp_path / "a").mkdir()
    picture = f"<svg>{log}</svg>"
    (tmp_path / "a" / "step.svg").write_text(picture)
    (tmp_path / "trace.json").write_text(12 * log)
    for number in range(16):
        (tmp_path / f"{number}.md").write_text(2 * log)
    (tmp_path / "rows.xml").write_text("<testsuites/>")
    on_gpu.save_logs(tmp_path)
    assert (tmp_path / "logs.tar.gz").stat().st_size < 16 * 2**20
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        saved = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    assert saved["79.log"].endswith(" end of 79")
    assert saved["a/step.svg"] == picture
    assert "rows.xml" in saved and "trace.json" not in saved


@pytest.mark.parametrize(
    ("device", "slowest", "result"), [("cuda", 0.79, FAILED), ("cuda", 0.8, PASSED), ("late", 0.1, PASSED)]
)
def test_kernels_that_are_slow_on_a_gpu_have_failed(tmp_path, monkeypatch, device, slowest, result):
    monkeypatch.setattr(steps, "BENCHMARKS", tmp_path)
    (tmp_path / "moves").write_text(
        f"#!/bin/sh\necho '9 us 9 GB/s  1.00 of a copy'; echo '9 us 9 GB/s  {slowest} of a copy'\n"
    )
    (tmp_path / "moves").chmod(0o755)
    outcome = steps.moves(steps.Place("moves", device, tmp_path))
    assert outcome.result == result
    assert f"{slowest} of a copy's speed" in outcome.said
