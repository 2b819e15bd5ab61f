"""What the picture and the table of a profiled step say of its spans."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import profile_picture  # noqa: E402
from profile_picture import Span  # noqa: E402

SPANS = [
    Span("stream 7", "sgemm", 0, 100),
    Span("stream 7", "Memcpy DtoD", 100, 150),
    # Inside the gap's first half something overlaps.
    Span("stream 7", "sgemm", 400, 900),
    Span("stream 7", "elementwise", 500, 700),
    Span("stream 7", "elementwise", 950, 1000),
    Span("stream 9", "ncclDevKernel_AllGather", 20, 320),
    Span("host thread 1", "aten::linear", 0, 50),
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy HtoD", "copy"),
        ("void shardwise::move_kernel<float>", "copy"),
        ("ncclDevKernel_ReduceScatter", "collective"),
        ("c10d::allreduce_", "collective"),
        ("ampere_sgemm_128x64", "compute"),
    ],
)
def test_names_tell_what_a_kernel_does(name, kind):
    assert Span("stream 7", name, 0, 1).kind == kind


def test_the_table_has_copies_and_gaps_of_each_lane():
    shown = profile_picture.table(SPANS, {"the step": 1.5}).splitlines()
    assert shown[0] == "the step: 1.500 ms"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown[4:]]
    assert [row[0] for row in rows] == ["host thread 1", "stream 7", "stream 9"]
    # spans, busy, copies, copying, collectives, gaps, idle, longest gap
    assert rows[1][1:] == ["5", "0.700", "1", "0.050", "0.000", "2", "0.300", "0.250"]
    assert rows[2][1:] == ["1", "0.300", "0", "0.000", "0.300", "0", "0.000", "0.000"]


def test_the_picture_has_a_lane_for_each_stream_and_a_tip_for_each_span():
    root = ET.fromstring(profile_picture.picture(SPANS))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"host thread 1", "stream 7", "stream 9", "1.00 ms"} <= set(texts)
    tips = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) == len(SPANS)
    assert "ncclDevKernel_AllGather: 0.300 ms" in tips
    rows = {float(element.get("y")) for element in root.iter("{http://www.w3.org/2000/svg}rect") if len(element)}
    assert len(rows) == 3
