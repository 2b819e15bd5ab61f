"""`make gpu`: its table, what it runs again, and that nothing that goes wrong, or is missing, counts as passed."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "test"))

import gpu_kit  # noqa: E402
import on_gpu  # noqa: E402
import on_gpu_steps as steps  # noqa: E402
from reports import FAILED, PASSED, SKIPPED, Result  # noqa: E402

FACTS = {name: name for name in ("machine", "GPU", "driver", "torch", "NCCL", "commit", "date")}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs steps of these outcomes, and gives the exit status, the table by step and the steps that really ran."""
    monkeypatch.setattr(on_gpu, "facts_of", lambda device: dict(FACTS))

    def ran(outcomes, *words, facts=None):
        FACTS.update(facts or {})
        began = []

        def step(name, outcome):
            def act(place):
                began.append(name)
                if isinstance(outcome, Exception):
                    raise outcome
                return steps.Outcome(*outcome)

            return steps.Step(name, f"about {name}", 60, act)

        found = [[step(name, outcome)] for name, outcome in outcomes.items()]
        status = on_gpu.main([*words, "--folder", str(tmp_path)], found)
        shown = capsys.readouterr().out.partition("\nstep ")[2].splitlines()[1:]
        return status, {line.split()[0]: " ".join(line.split()[1:]) for line in shown}, began

    yield ran
    FACTS.update(commit="commit", GPU="GPU")


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


def test_what_is_missing_fails_nothing(run):
    assert run({"good": GOOD, "lacking": LACKING})[0] == 0


def test_what_has_passed_is_not_run_again_unless_asked(run):
    outcomes = {"good": GOOD, "bad": BAD, "lacking": LACKING}
    run(outcomes)
    status, table, began = run({**outcomes, "bad": GOOD})
    assert began == ["bad", "lacking"]
    assert (status, table["good"], table["bad"]) == (0, "passed 0 3 passed", "passed 0 3 passed")
    assert run(outcomes, "--again")[2] == ["good", "bad", "lacking"]


def test_another_commit_or_gpu_counts_anew(run):
    run({"good": GOOD})
    assert run({"good": GOOD})[2] == []
    assert run({"good": GOOD}, facts={"commit": "another"})[2] == ["good"]
    assert run({"good": GOOD}, facts={"GPU": "another"})[2] == ["good"]


def test_a_result_that_breaks_off_is_none(run, tmp_path):
    run({"good": GOOD})
    (tmp_path / "good.json").write_text('{"step": "good", "resu')
    assert run({"good": GOOD})[2] == ["good"]


def test_steps_are_chosen_by_how_they_begin(run):
    outcomes = {"build": GOOD, "rank_tests_1": GOOD, "rank_tests_2": GOOD}
    assert run(outcomes, "rank_tests", "--again")[2] == ["rank_tests_1", "rank_tests_2"]
    assert run(outcomes, "--list")[2] == []
    with pytest.raises(SystemExit, match="there is no step wrong"):
        run(outcomes, "wrong")


def test_each_step_can_be_run_alone():
    names = [step.name for step in steps.STEPS]
    assert len(set(names)) == len(names)
    assert all(step.about for step in steps.STEPS)


def test_skipped_tests_alone_have_not_passed():
    skipped = Result("s", "", "A.b", SKIPPED, "graph_test.cpp:9\na CUDA graph needs a GPU")
    assert steps.outcome_of([skipped]) == steps.Outcome(steps.MISSING, "a CUDA graph needs a GPU")
    assert steps.outcome_of([]).result == steps.MISSING
    assert steps.outcome_of([skipped, Result("s", "", "A.c", PASSED)]).result == PASSED
    assert steps.outcome_of([Result("s", "", "A.c", PASSED)], "it crashed") == steps.Outcome(
        FAILED, "1 passed, 0 failed, 0 skipped: it crashed"
    )


def test_without_a_gpu_nothing_that_needs_one_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "gpus", lambda: steps.Gpus(0))
    for step in steps.STEPS:
        if not step.name.startswith(("build", "unit_tests", "bench")):
            outcome = step.run(steps.Place(step.name, "cuda", tmp_path))
            assert outcome == steps.Outcome(steps.MISSING, "torch finds no GPU here"), step.name


@pytest.mark.parametrize(
    ("count", "nccl", "result"), [(1, (2, 28, 9), steps.MISSING), (1, (2, 30, 1), PASSED), (2, (2, 20), PASSED)]
)
def test_several_ranks_need_gpus_or_an_nccl_that_shares_one(monkeypatch, tmp_path, count, nccl, result):
    monkeypatch.setattr(steps, "gpus", lambda: steps.Gpus(count, nccl))
    monkeypatch.setattr(steps, "trains_beside_others", lambda place, ranks, over, **more: steps.Outcome(PASSED, ""))
    assert steps.nccl_several_ranks(steps.Place("nccl", "cuda", tmp_path)).result == result


@pytest.mark.parametrize(
    ("built", "result", "said"),
    [
        ("-DUSE_C10D_NCCL kernels.cu.o", PASSED, "NCCL and our kernels"),
        ("-DUSE_C10D_NCCL", steps.MISSING, "there is no nvcc"),
        ("", steps.MISSING, "torch is a CPU build"),
    ],
)
def test_what_a_build_leaves_out_is_told(monkeypatch, tmp_path, built, result, said):
    (tmp_path / "build.ninja").write_text(built)
    monkeypatch.setattr(steps, "BUILD", tmp_path)
    outcome = steps.cuda_support(steps.Place("build_has_cuda", "cuda", tmp_path))
    assert outcome.result == result
    assert said in outcome.said


def test_without_test_libraries_their_programs_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "missing_test_headers", lambda: ["gtest/gtest.h"])
    outcome = steps.build_tests(steps.Place("build_tests", "late", tmp_path))
    assert outcome.result == steps.MISSING
    assert "gtest/gtest.h" in outcome.said
    assert "SHARDWISE_TEST_DEPS" in outcome.said


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


def test_steps_of_a_stage_run_beside_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(on_gpu, "facts_of", lambda device: dict(FACTS))
    meeting = threading.Barrier(2, timeout=60)

    def meets(place):
        meeting.wait()
        return steps.Outcome(PASSED, "met")

    stage = [steps.Step(name, "about", 60, meets) for name in ("one", "two")]
    assert on_gpu.main(["--folder", str(tmp_path)], [stage]) == 0
    (tmp_path / "one.log").write_text("x" * 400_000 + "the end")
    on_gpu.save_logs(tmp_path)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert {"one.json", "two.json", "facts.json", "one.log"} <= set(archive.getnames())
        kept = archive.extractfile("one.log").read()
    assert len(kept) == on_gpu.LOG_BYTES
    assert kept.endswith(b"the end")


def test_no_step_begins_when_the_time_is_up(run):
    status, table, began = run({"good": GOOD}, "--seconds", "0")
    assert (status, began) == (0, [])
    assert table["good"] == "missing 0 the time was up"


PYTEST = """test/a.py::T::test_one[2] PASSED  [ 20%]
test/a.py::T::test_two SKIPPED (a CU...) [ 40%]
words of a rank
test/a.py::T::test_three FAILED [ 60%]
test/a.py::T::test_four
SKIPPED [1] test/a.py:12: a CUDA graph needs a GPU"""


def test_of_a_pytest_that_was_ended_the_results_so_far_count():
    found = {result.name: (result.outcome, result.message) for result in steps.read_pytest("s", PYTEST)}
    assert found == {
        "test/a.py::T::test_one[2]": (PASSED, ""),
        "test/a.py::T::test_two": (SKIPPED, "a CUDA graph needs a GPU"),
        "test/a.py::T::test_three": (FAILED, ""),
        "test/a.py::T::test_four": (FAILED, "it did not end"),
    }


def library_for_gpus(folder, architectures):
    """As CUDA's compiler leaves it: containers of entries with code."""
    entries = b""
    for number, arch in enumerate(architectures):
        code = bytes([65 + number]) * 64
        entries += struct.pack("<HHIQ", 2, 0, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + code
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries
    file = folder / "library.so"
    file.write_bytes(b"before" + container + b"between" + container + b"after")
    return file


def test_a_kit_keeps_the_code_of_one_architecture(tmp_path):
    file = library_for_gpus(tmp_path, [80, 90, 100])
    size = file.stat().st_size
    gpu_kit.keep_one_architecture(file, 90)
    kept = file.read_bytes()
    assert len(kept) == size
    assert [kept.count(letter) for letter in (b"A", b"B", b"C")] == [0, 128, 0]
    assert kept.startswith(b"before")
    assert b"between" in kept
    assert kept.endswith(b"after")


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A folder with a kit for this Python, and a tree to unpack it into."""
    tree = tmp_path / "tree"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc" / "a.cpp").write_text("int a;")
    monkeypatch.setattr(gpu_kit, "ROOT", tree)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    folder = tmp_path / "kit"
    folder.mkdir()
    (tmp_path / "built").write_text("built")
    gpu_kit.pack({"build/dev/built": tmp_path / "built"}, folder / "kit.tar.xz")
    manifest = {
        "commit": "0123456789",
        "sources": gpu_kit.sources_of(tree),
        "Python": "{}.{}".format(*sys.version_info),
        "torch": "2.11.0",
        "sha256": {"kit.tar.xz": hashlib.sha256((folder / "kit.tar.xz").read_bytes()).hexdigest()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder, tree, manifest


def test_a_kit_is_unpacked_into_the_tree(kit, capsys):
    folder, tree, _ = kit
    gpu_kit.unpack(folder)
    assert (tree / "build/dev/built").read_text() == "built"
    assert os.environ["PYTHONPATH"] == str(tree / "python")
    assert os.environ["LD_LIBRARY_PATH"].startswith(str(tree / "python/shardwise/lib"))
    assert capsys.readouterr().out == ""


def test_a_kit_of_other_sources_says_so(kit, capsys):
    folder, tree, _ = kit
    (tree / "csrc" / "a.cpp").write_text("int b;")
    gpu_kit.unpack(folder)
    assert "THE KIT IS OF OTHER SOURCES than these: of commit 012345678" in capsys.readouterr().out


def test_a_kit_for_another_python_or_a_damaged_one_is_refused(kit):
    folder, _, manifest = kit
    (folder / "manifest.json").write_text(json.dumps({**manifest, "Python": "3.9"}))
    with pytest.raises(SystemExit, match="the kit is for Python 3.9"):
        gpu_kit.unpack(folder)
    (folder / "kit.tar.xz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="is not the file that the kit was made with"):
        gpu_kit.unpack(folder)


def test_make_gpu_lists_its_steps():
    command = ["make", "-n", "gpu", "STEPS=profile bench", "DEVICE=late", "AGAIN=1"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "test/on_gpu.py profile bench --device late" in shown
    assert "--again" in shown
    shown = subprocess.run([*command, "KIT=.gpukit"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "prepare.sh" not in shown, "nothing is built where there is a kit"
