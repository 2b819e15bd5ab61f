"""Scripts that check: what they must find is found."""

from __future__ import annotations

import arrows
import make_docs


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


def test_headers_that_are_not_there_are_told():
    file = arrows.ROOT / "benchmarks" / "cpp" / "overlap.cpp"
    text = '#include "host_wire.h"\n#include "comm/mesh/mesh_groups.h"\n#include "engine/unit.h"\n'
    assert list(arrows.missing_headers(file, text)) == [
        "benchmarks/cpp/overlap.cpp: includes comm/mesh/mesh_groups.h, which is not there"
    ]


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "other.html").write_text('<a id="here"></a>')
    links = ("other.html", "other.html#here", "#top", "https://example.org/none", "none.html", "other.html#none")
    text = "".join(f'<a href="{link}">text</a>' for link in links)
    (tmp_path / "page.html").write_text(f'<h1 id="top">x</h1>{text}')
    found = list(make_docs.link_problems(tmp_path))
    assert len(found) == 2
    assert "is not there" in found[0]
    assert "no such place" in found[1]


def test_names_without_a_comment_are_told_from_other_warnings():
    log = "\n".join(
        [
            "a.h:3: warning: Compound shardwise::Counter is not documented.",
            "a.h:9: warning: Member size(bool all) const (function) of class shardwise::Mesh is not documented.",
            "a.h:9: warning: Member size() const (function) of class shardwise::Mesh is not documented.",
            "a.h:12: warning: unable to resolve reference to `none'",
        ]
    )
    assert make_docs.undocumented(log) == ["Counter", "Mesh::size"]
    assert make_docs.other_warnings(log) == ["a.h:12: warning: unable to resolve reference to `none'"]
