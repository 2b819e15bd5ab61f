"""The suite `hosts`, in small: ranks of two hosts train over a link whose bytes are counted."""

from __future__ import annotations

import pytest
from bench_modules import BUILD, imported


@pytest.fixture
def hosts(monkeypatch):
    for modules in imported(monkeypatch):
        yield modules["hosts"]


def test_what_crosses_the_link_is_counted(hosts):
    if hosts.missing():
        pytest.skip(hosts.missing())
    found = {figure.name: figure for figure in hosts.suite(BUILD, *hosts.SHORT)}
    about = "0.1 M, 2 hosts of 2 ranks, 200 Mbit/s"
    assert set(found) == {
        f"{about}: {name}: {what}" for name in ("DDP", "Python replicate") for what in ("step", "over the link")
    }
    # An all-reduce among four ranks takes 1.5 of the parameters from each; half of the neighbours are elsewhere.
    assert 2.9 < found[f"{about}: DDP: over the link"].value < 4
    assert 2.9 < found[f"{about}: Python replicate: over the link"].value < 6
