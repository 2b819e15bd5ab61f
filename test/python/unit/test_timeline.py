"""python -m shardwise timeline: the picture of given events; ranks/test_record.py has what ranks record."""

from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise import _record_files, _timeline
from shardwise.__main__ import main
from shardwise._record_files import Event

SVG = "{http://www.w3.org/2000/svg}"
MS = 1_000_000


def events(rank: int = 0) -> list[Event]:
    """A step of 10 ms: a gather of 4 of which 1 is waited for, and a sum of 4 that is waited for to its end."""
    return [
        Event("forward", "(root)", rank, 0, 5 * MS, 0),
        Event("forward", "block & <1>", rank, 1 * MS, 4 * MS, 0),
        Event("all-gather", "the all-gather of block", rank, 0, 4 * MS, 1000),
        Event("wait", "the all-gather of block", rank, 3 * MS, 4 * MS, 0),
        Event("backward", "(root)", rank, 5 * MS, 9 * MS, 0),
        Event("reduce-scatter", "the sum of block", rank, 6 * MS, 10 * MS, 2_000_000),
        Event("wait", "the sum of block", rank, 6 * MS, 10 * MS, 0),
        Event("stage", "0F0", rank, 0, 5 * MS, 0),
    ]


def rectangles(picture: str) -> dict[str, ET.Element]:
    """By what they say when pointed at."""
    root = ET.fromstring(picture)
    found = {}
    for rectangle in root.iter(f"{SVG}rect"):
        title = rectangle.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text] = rectangle
    return found


def test_spans_lie_where_their_times_are() -> None:
    found = rectangles(_timeline.svg(events()))
    assert len(found) == 8
    block = found["forward: block & <1>: 3.000 ms"]
    assert float(block.attrib["x"]) == pytest.approx(_timeline.LEFT + 0.1 * _timeline.WIDTH, abs=0.1)
    assert float(block.attrib["width"]) == pytest.approx(0.3 * _timeline.WIDTH, abs=0.1)
    assert "reduce-scatter: the sum of block: 4.000 ms, 2 MB" in found
    # What overlaps lies in rows of its own.
    rows = {float(rectangle.attrib["y"]) for rectangle in found.values()}
    assert len(rows) == 6
    assert block.attrib["y"] != found["forward: (root): 5.000 ms"].attrib["y"]


def test_what_is_hidden_is_the_wire_without_the_waits() -> None:
    # 8 ms on the wire, of which 5 are waited for.
    assert _timeline.hidden(events(), 0) == pytest.approx(3 / 8)
    assert _timeline.hidden(events(), 1) == 1
    row = [line for line in _timeline.table(events()) if "<td>0</td>" in line]
    assert row == [
        "<tr><td>0</td><td>10.00</td><td>5.00</td><td>9.00</td><td>5.00</td><td>4.00</td><td>4.00</td><td>38%</td></tr>\n"
    ]


def test_only_the_last_steps_are_drawn() -> None:
    later = [Event(e.kind, e.name, e.rank, e.begin + 20 * MS, e.end + 20 * MS, e.bytes) for e in events()]
    both = events() + later
    assert _timeline.steps(both, 0) == [0, 20 * MS]
    assert _timeline.last_steps(both, 1) == later
    assert _timeline.last_steps(both, 5) == both


def test_steps_of_a_pipeline_are_its_own() -> None:
    # Each has a forward for every microbatch.
    of_step = [
        Event("step", "a step", 0, 0, 10, 0),
        Event("forward", "(root)", 0, 1, 2, 0),
        Event("forward", "(root)", 0, 3, 4, 0),
    ]
    later = [replace(event, begin=event.begin + 20, end=event.end + 20) for event in of_step]
    assert _timeline.last_steps(of_step + later, 1) == later


def as_text(recorded: list[Event]) -> str:
    return json.dumps([vars(event) for event in recorded])


def file_of(folder: Path, rank: int = 0, text: str = "") -> Path:
    """What a rank recorded: the step above, if nothing else is said."""
    file = folder / f"shardwise-rank{rank}.json"
    file.write_text(text or as_text(events(rank)))
    return file


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command for the folder of the test or another one: its status and what it said."""

    def command(*words: object, folder: Path = tmp_path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwise", "timeline", str(folder), *map(str, words)])
        return (main(), *capsys.readouterr())

    return command


def test_the_command_writes_a_page(tmp_path: Path, run: Run) -> None:
    for rank in (0, 1):
        file_of(tmp_path, rank, as_text(events()))
    status, out, _ = run()
    assert status == 0 and "rank 0: 38% of the time on the wire was not waited for" in out
    page = (tmp_path / "timeline.html").read_text()
    # It opens offline: nothing is fetched.
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    picture = page[page.index("<svg") : page.index("</svg>") + 6]
    assert len(rectangles(picture)) == len(events())
    assert run("--out", tmp_path / "picture.svg")[0] == 0
    assert (tmp_path / "picture.svg").read_text() == picture


def test_a_forward_ends_where_a_backward_begins_at_the_latest(tmp_path: Path) -> None:
    open_ended = replace(events()[1], name="called directly", end=8 * MS)
    later = Event("forward", "(root)", 0, 11 * MS, 12 * MS, 0)
    file_of(tmp_path, 0, as_text([*events(), open_ended, later, replace(open_ended, rank=1)]))
    ends = {(e.rank, e.name, e.begin): e.end for e in _record_files.read(tmp_path) if e.kind == "forward"}
    assert ends == {
        (0, "(root)", 0): 5 * MS,
        (0, "block & <1>", MS): 4 * MS,
        (0, "called directly", MS): 5 * MS,
        (0, "(root)", 11 * MS): 12 * MS,
        # No backward of this rank is known.
        (1, "called directly", MS): 8 * MS,
    }


def test_the_trace_keeps_the_rules_of_chromes_format(tmp_path: Path, run: Run) -> None:
    # Spans that overlap, and neither holds the other.
    crossing = Event("backward", "block", 0, 7 * MS, 9 * MS + 500, 0)
    for rank in (0, 3):
        later = [replace(e, begin=e.begin + 20 * MS, end=e.end + 20 * MS) for e in [*events(rank), crossing]]
        file_of(tmp_path, rank, as_text([*events(rank), *(replace(e, rank=rank) for e in later)]))
    file = tmp_path / "trace.json"
    status, out, _ = run("--last", 1, "--chrome", file)
    assert status == 0 and str(file) in out.splitlines()
    found = json.loads(file.read_text())["traceEvents"]
    assert {each["ph"] for each in found} == {"M", "X"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    spans = [each for each in found if each["ph"] == "X"]
    assert len(spans) == 2 * (2 * len(events()) + 1), "all steps, whatever the page shows"
    assert all(set(each) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"} for each in spans)
    assert [each["ts"] for each in spans] == sorted(each["ts"] for each in spans)
    assert spans[0]["ts"] == 0 and max(each["ts"] + each["dur"] for each in spans) == 30_000
    block = [each for each in spans if each["name"] == "block & <1>" and each["pid"] == 3]
    assert [(each["ts"], each["dur"], each["cat"]) for each in block] == [
        (1000, 3000, "forward"),
        (21000, 3000, "forward"),
    ]
    assert {e["args"]["name"] for e in found if e["name"] == "process_name"} == {"rank 0", "rank 3"}
    assert {names[each["pid"], each["tid"]] for each in spans} == {
        "stages", "compute", "compute 2", "waits", "gathers", "sums",
    }  # fmt: skip
    for lane in names:
        own = [each for each in spans if (each["pid"], each["tid"]) == lane]
        assert own, "no row is empty"
        for one in own:
            for other in own:
                apart = one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]
                inside = other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]
                holds = one["ts"] <= other["ts"] and other["ts"] + other["dur"] <= one["ts"] + one["dur"]
                assert apart or inside or holds, (one, other)


FIRST = vars(events()[0])
MALFORMED = {
    "no JSON": "[{",
    "a list of numbers": "[1]",
    "without a rank": json.dumps([{"kind": "wait", "name": "x", "begin": 0, "end": 1, "bytes": 0}]),
    "a script for a rank": json.dumps([FIRST | {"rank": "<script>alert(1)</script>"}]),
    "an end before the begin": json.dumps([FIRST | {"begin": 7, "end": 5}]),
    "a time that no clock has": json.dumps([FIRST | {"end": 10**400}]),
    "lists in lists": "[" * 100_000,
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_file_that_is_no_record_is_named(what: str, tmp_path: Path, run: Run) -> None:
    file_of(tmp_path)
    file = file_of(tmp_path, 1, MALFORMED[what])
    status, _, said = run()
    assert status == 1 and "line 1" in said
    assert said.startswith(f"shardwise: {file} is not a record that a program wrote: ") and said.count("\n") == 1
    assert not (tmp_path / "timeline.html").exists()


def test_no_damage_is_more_than_an_error_or_another_picture(tmp_path: Path, run: Run) -> None:
    chance = random.Random(1)
    file = file_of(tmp_path)
    whole = file.read_bytes()
    for _ in range(100):
        damaged = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randrange(4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        failed, _, said = run("--chrome", tmp_path / "trace.json")
        assert (not failed and not said) or (failed == 1 and str(file) in said and "line " in said)


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path, run: Run) -> None:
    status, _, said = run()
    assert status == 1 and f"SHARDWISE_RECORD={tmp_path}" in said
    (tmp_path / "file").write_text("")
    for none in ("file", "nothing"):
        status, _, said = run(folder=tmp_path / none)
        assert status == 1 and f"nothing was recorded in {tmp_path / none}" in said
    file = tmp_path / "shardwise-rank0.json"
    file.mkdir()
    assert f"{file} is not a record" in run()[2]
    file.rmdir()
    file.write_bytes(b"\xff[]")
    assert f"{file} is not a record" in run()[2]
    file_of(tmp_path)
    for option in ("--out", "--chrome"):
        status, _, said = run(option, tmp_path / "no" / "page.html")
        assert status == 1 and "could not be written" in said and option in said


def test_words_of_a_record_stay_words(tmp_path: Path, run: Run) -> None:
    name = "</title></svg><script>alert(1)</script>\ud800"
    spans = [replace(event, name=name, end=event.begin) for event in events()]
    file_of(tmp_path, 0, as_text([*events(), *spans]))
    assert run()[0] == 0
    page = (tmp_path / "timeline.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    # Of no length at all.
    assert "<svg" in _timeline.page([replace(events()[0], end=0)])
