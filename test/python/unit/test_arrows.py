"""The rule of the includes: arrows between the folders of csrc go one way."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

arrows = SimpleNamespace(**runpy.run_path(str(Path(__file__).resolve().parents[3] / "scripts" / "arrows.py")))


def test_every_arrow_goes_down() -> None:
    assert list(arrows.problems()) == []
    seen: set[str] = set()
    for folder, below in arrows.BELOW.items():
        assert set(below.split()) <= seen, f"{folder} sees a folder that stands above it"
        seen.add(folder)


def test_what_goes_up_or_around_a_door_is_told() -> None:
    assert list(arrows.wrong_arrows("comm", '#include "engine/unit.h"\n')) == [
        "includes engine/unit.h, but comm may not see engine"
    ]
    assert list(arrows.wrong_arrows("comm", '#include "transport/backend.h"\n#include "transport/transport.h"\n')) == [
        "includes transport/backend.h, but others see transport by transport/transport.h alone"
    ]


def test_a_header_of_others_is_seen_by_one_source_alone() -> None:
    text = "#include <nlohmann/json.hpp>\n"
    assert list(arrows.escaped_headers("files/json.cpp", text)) == []
    assert list(arrows.escaped_headers("files/json.h", text)) == [
        "includes nlohmann/, which files/json.cpp alone may see"
    ]
