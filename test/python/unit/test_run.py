"""The test command: what it counts, and that nothing that goes wrong is counted as good."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import changed
import parts
import pytest
import run
import seconds
import suites
import tables
from check_rows import read_rows
from checkout import ROOT
from programs import last_lines, run_program
from reports import FAILED, PASSED, SKIPPED, Result, counts, read_closing_line, read_counts, read_junit

#: As GoogleTest, pytest and Catch2 write them.
REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite>
<testcase name="Breaks" classname="Mesh">
  <failure message="mesh_test.cpp:3&#x0A;1 is not 2" type=""><![CDATA[mesh_test.cpp:3\n1 is not 2]]></failure>
</testcase><testcase name="Needs" classname="Mesh">
  <skipped message="mesh_test.cpp:9&#x0A;needs two GPUs"><![CDATA[mesh_test.cpp:9\nneeds two GPUs]]></skipped>
</testcase><testcase name="DISABLED_Off" status="notrun" result="suppressed" time="0" classname="Mesh" />
<testcase classname="test.TestA" name="test_works[2]" time="0.1" />
<testcase classname="test.TestA" name="test_breaks"><failure message="short">long</failure>
<system-err>what it said before it crashed</system-err></testcase>
<testcase classname="" name="test.broken" time="0"><error message="collection failure">no module</error></testcase>
<testcase classname="test.TestA" name="test_needs" time="0"><skipped type="pytest.skip" message="needs X">f:1</skipped>
</testcase>
<testcase classname="unit_tests.global" name="Flat.Works" time="0.1" status="run"/>
<testcase classname="unit_tests.global" name="breaks" time="0" status="run">
<failure message="a == b" type="CHECK">FAILED: CHECK( a == b ) at f.cpp:11</failure></testcase>
</testsuite></testsuites>
"""


def outcomes(results: list[Result]) -> list[tuple[str, str, str]]:
    return [(result.title, result.outcome, result.message) for result in results]


def test_reports_are_read(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert outcomes(read_junit("a_suite", tmp_path / "report.xml")) == [
        ("Mesh.Breaks", FAILED, "mesh_test.cpp:3\n1 is not 2"),
        ("Mesh.Needs", SKIPPED, "needs two GPUs"),
        ("Mesh.DISABLED_Off", SKIPPED, "its name begins with DISABLED_"),
        ("test.TestA.test_works[2]", PASSED, ""),
        ("test.TestA.test_breaks", FAILED, "long\nwhat it said before it crashed"),
        ("test.broken", FAILED, "no module"),
        ("test.TestA.test_needs", SKIPPED, "needs X"),
        ("Flat.Works", PASSED, ""),
        ("breaks", FAILED, "FAILED: CHECK( a == b ) at f.cpp:11"),
    ]


def test_the_closing_line_is_a_sum():
    results = [Result("s", "", "t", outcome) for outcome in (PASSED, PASSED, FAILED, SKIPPED, PASSED)]
    assert counts(results) == "3 passed, 1 failed, 1 skipped"
    assert counts(results, read_counts("make: 4 passed, 0 failed, 2 skipped\n")) == "7 passed, 1 failed, 3 skipped"


def test_a_closing_line_is_read_from_the_log(tmp_path):
    (tmp_path / "mutants.log").write_text(
        "1 passed, 1 failed\nthis: test  3 s\n2 passed, 1 failed\nnot noticed in each of its languages: that\n"
    )
    assert outcomes(read_closing_line("mutants", tmp_path / "mutants.xml")) == [
        ("", PASSED, ""), ("", PASSED, ""), ("that", FAILED, ""),
    ]  # fmt: skip


def suite(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit: int = 60) -> run.Suite:
    for module in (run, suites):
        monkeypatch.setattr(module, "OUT", folder)
        monkeypatch.setattr(module, "ROOT", folder)
    return run.Suite("a_suite", ["sh", "-c", script], read_junit, limit)


GOOD = '<testsuites><testsuite><testcase classname="A" name="b"/></testsuite></testsuites>'


@pytest.mark.parametrize(
    ("script", "limit", "said"),
    [
        ("kill -SEGV $$", 60, "it crashed with SIGSEGV, but there is no report of a test"),
        ("exit 0", 60, "it ended well, but there is no report of a test"),
        ("printf '<testsuites><testsuite>' > a_suite.xml", 60, "there is no report of a test"),
        (f"echo '{GOOD}' > a_suite.xml; exit 1", 60, "ended with status 1, though no test of its report failed"),
        ("sleep 300", 1, "it was ended after 1 s"),
    ],
)
def test_a_suite_that_goes_wrong_counts_as_failed(tmp_path, monkeypatch, script, limit, said):
    (tmp_path / "a_suite.xml").write_text(GOOD)  # of an earlier run: it must not count
    results, _ = run.run_suite(suite(tmp_path, monkeypatch, script, limit))
    assert results[-1].outcome == FAILED
    assert said in results[-1].message
    assert "The last lines of its output" in results[-1].message


def test_a_suite_that_goes_well_counts_its_tests_and_seconds(tmp_path, monkeypatch, capsys):
    report = GOOD.replace('"b"', '"b" time="7.5"')
    work = "import time\nwhile time.process_time() < 0.7: pass"
    script = f"echo '{report}' > a_suite.xml; {sys.executable} -c '{work}'"
    passed, result = run.run_suites([suite(tmp_path, monkeypatch, script)], has_budget=True)
    assert (passed.title, passed.outcome, result.outcome) == ("A.b", PASSED, FAILED)
    assert "1 of    0 s of CPU time: a_suite: beyond it" in result.message
    assert "7.5 s: a_suite: A.b" in capsys.readouterr().out


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return re.search(r"^State:\tZ", status, re.MULTILINE) is None


def test_past_the_limit_no_process_is_left(tmp_path):
    script = "sleep 300 & echo $!; wait"
    assert run_program(["sh", "-c", script], tmp_path / "log", 1, tmp_path, {"PATH": "/usr/bin:/bin"})[0]
    child = int(last_lines(tmp_path / "log", 1).splitlines()[-1])
    # A process that was killed takes a moment to end.
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_fresh_clone_sees_nothing_of_this_run(monkeypatch):
    for name in ("MAKEFLAGS", "PYTHONPATH", "SHARDWISE_NINJA", "FRESH_CLONE", "SHARDWISE_TEST_DEPS"):
        monkeypatch.setenv(name, "x")
    script = suites.fresh_clone().command[-1]
    for name in ("MAKEFLAGS", "PYTHONPATH", "SHARDWISE_NINJA", "FRESH_CLONE"):
        assert f"-u {name} " in script
    assert "SHARDWISE_TEST_DEPS" not in script


def test_what_takes_more_than_its_budget_or_has_none_fails_the_run(tmp_path):
    budgets = tmp_path / "budgets.tsv"
    budgets.write_text("what\tseconds\nrank_tests\t100\nbuild of rank_tests\t5\n")
    folder = tmp_path / "test" / "CMakeFiles" / "rank_tests.dir"
    folder.mkdir(parents=True)
    for name, there in (("a.o", True), ("b.o", True), ("gone.o", False)):
        (folder / f"{name}.seconds").write_text("0m0.00s 0m0.00s\n0m1.50s 0m0.25s\n")
        if there:
            (folder / name).touch()
    built = seconds.of_builds(tmp_path)
    assert built == {"build of rank_tests": 3.5}
    ran = {"rank_tests": 99.0}
    assert seconds.check({**ran, **built}, budgets).outcome == PASSED
    for used in ({"rank_tests": 101.0}, {"other": 1.0}):
        result = seconds.check({**ran, **used}, budgets)
        assert result.outcome == FAILED
        assert "s of CPU time: " + "".join(used) + ": beyond it" in result.message
    budgets.write_text("what\nrank_tests\n")
    assert seconds.check(ran, budgets).outcome == FAILED


def test_budgets_know_a_slow_machine_from_one_line_that_takes_more(tmp_path):
    budgets = tmp_path / "budgets.tsv"
    budgets.write_text("what\tseconds\n" + "".join(f"suite{number}\t150\n" for number in range(7)))
    slow = {f"suite{number}": 180.0 for number in range(7)}
    assert seconds.check(slow, budgets).outcome == PASSED
    assert seconds.check({**slow, "suite3": 280.0}, budgets).outcome == FAILED
    usual = {f"suite{number}": 100.0 for number in range(7)}
    assert seconds.check({**usual, "suite3": 151.0}, budgets).outcome == FAILED
    assert seconds.check({**slow, "another": 1.0}, budgets).outcome == FAILED


def test_every_test_of_the_other_tier_is_there():
    sources = "".join(file.read_text() for file in (ROOT / "test" / "python").glob("*/test_*.py"))
    for title in suites.ci_names(python=True):
        name = title.rpartition(".")[2].partition("[")[0].rstrip("*")
        assert re.search(rf"\b(def )?{name}\w*( = on_ranks)?\(", sources), f"{title} of ci.tsv"
    sources = "".join(file.read_text() for file in (ROOT / "test" / "cpp" / "ranks").glob("*.cpp"))
    for title in suites.ci_names(python=False):
        assert re.search(rf"\b{title.rpartition('.')[2].rstrip('*')}", sources), f"{title} of ci.tsv"


def test_a_change_chooses_what_noticed_its_mutants():
    chosen = {suite.name: " ".join(suite.command) for suite in changed.choose(["csrc/engine/order.cpp"])}
    assert "FullyShardPrefetch." in chosen["rank_tests"] and "unit_tests" in chosen
    (suite,) = changed.choose(["test/cpp/ranks/documents_test.cpp"])
    assert suite.name == "rank_tests" and "*Documents*." in suite.command[-1]
    (suite,) = changed.choose(["test/python/unit/test_docs.py", "docs/testing.md"])
    assert suite.command[4] == "test/python/unit/test_docs.py"


def test_what_the_late_device_leaves_out_has_a_reason_and_is_there():
    left_out = suites.late_filter().partition("*-")[2].split(":")
    sources = "".join(file.read_text() for file in (ROOT / "test" / "cpp" / "ranks").glob("*.cpp"))
    for tests in left_out:
        group, _, name = tests.partition(".")
        found = re.search(rf"TEST(_F|_P)?\({group.rstrip('*')}\w*, {name.rstrip('*')}", sources)
        assert found, f"test/late_exceptions.tsv: {tests} is no test"
    reasons = [line["reason"] for line in tables.read(ROOT / "test" / "late_exceptions.tsv")]
    assert len(reasons) == len(left_out)
    assert all(reasons)


def test_ranks_on_one_device_run_some_of_everything():
    rows = [row.title for row in read_rows(ROOT / "test" / "rows.tsv") if row.language == "cpp"]
    for start in (name.rstrip("*") for name in suites.SHARED_ROWS.split(":")):
        assert any(row.startswith(start) for row in rows), f"{start} begins no row"


def test_parts_that_took_longer_here_say_how_long_others_will():
    usual = {each.name: str(each.minutes) for each in parts.PARTS}

    def table(commit: str, **minutes: float) -> dict[str, dict[str, str]]:
        return {name: {"commit": commit, "minutes": str(value)} for name, value in (usual | minutes).items()}

    assert parts.pace(table("abc"), "abc") == 1
    slow = {each.name: 1.5 * each.minutes for each in parts.PARTS}
    assert parts.pace(table("abc+", **slow), "abc") == 1.5
    # Another machine's, maybe.
    assert parts.pace(table("def", **slow), "abc") == 1
    assert parts.pace(table("abc", **dict.fromkeys(usual, 1)), "abc") == 1


def test_every_part_watches_what_exists():
    for each in parts.PARTS:
        assert all((ROOT / path).exists() for path in each.watches), each.name
