"""test/torches.py: copies of the sources for each version of torch; its table, and that of the wheels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs
import pytest
import tables
import torches
import try_wheels
from checkout import ROOT

VERSIONS = ROOT / "docs" / "versions.md"


def test_a_copy_follows_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    (checkout / "folder").mkdir(parents=True)
    copy.mkdir()
    subprocess.run(["git", "init", "--quiet", str(checkout)], check=True)
    for name in ("kept", "folder/changed", "removed", "ignored"):
        (checkout / name).write_text(name)
    (checkout / ".gitignore").write_text("ignored\n")
    monkeypatch.setattr(programs, "ROOT", checkout)
    torches.copy_sources(copy)
    (copy / "build").mkdir()
    before = (copy / "kept").stat().st_mtime_ns
    (checkout / "folder" / "changed").write_text("other")
    (checkout / "removed").unlink()
    torches.copy_sources(copy)
    assert (copy / "folder" / "changed").read_text() == "other"
    assert (copy / "kept").stat().st_mtime_ns == before, "a file that is the same is not built again"
    assert {path.name for path in copy.iterdir()} == {".gitignore", ".sources", "build", "folder", "kept"}


def test_the_page_has_the_table() -> None:
    page = VERSIONS.read_text()
    found = tables.by_name(torches.TABLE)
    assert set(found) <= set(torches.torch_versions())
    for version in torches.torch_versions():
        row = found.get(version)
        line = f"| {version} | not run yet | |" if row is None else f"| {version} | {row['date']} | {row['result']} |"
        assert line in page, line


def test_the_page_has_the_wheels() -> None:
    page = VERSIONS.read_text()
    rows = tables.read(try_wheels.TABLE)
    assert rows
    for row in rows:
        line = "| {Python} | {torch}, from {torch came from} | {MiB} MiB | {seconds} | {date} | {result} |".format(
            **row
        )
        assert line in page, line
