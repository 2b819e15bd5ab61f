"""The rule of the includes: arrows between the folders of csrc go one way."""

from __future__ import annotations

import arrows


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
