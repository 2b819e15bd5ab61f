"""The checks that `make docs` does of the reference it makes."""

from __future__ import annotations

import pytest
from test_commands import load

reference = load("reference")


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.html", ""),
        ("other.html#here", ""),
        ("#top", ""),
        ("https://example.org/none", ""),
        ("none.html", "is not there"),
        ("other.html#none", "no such place"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path, link, problem):
    (tmp_path / "other.html").write_text('<a id="here"></a>')
    (tmp_path / "page.html").write_text(f'<h1 id="top">x</h1><a href="{link}">text</a>')
    found = list(reference.link_problems(tmp_path))
    assert bool(found) == bool(problem)
    assert problem in "".join(found)


def test_names_without_a_comment_are_told_from_other_warnings():
    log = "\n".join(
        [
            "a.h:3: warning: Compound shardwise::Counter is not documented.",
            "a.h:9: warning: Member size(bool all) const (function) of class shardwise::Mesh is not documented.",
            "a.h:9: warning: Member size() const (function) of class shardwise::Mesh is not documented.",
            "a.h:12: warning: unable to resolve reference to `none'",
        ]
    )
    assert reference.undocumented(log) == ["Counter", "Mesh::size"]
    assert reference.other_warnings(log) == ["a.h:12: warning: unable to resolve reference to `none'"]
