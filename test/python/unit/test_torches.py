"""test/torches.py: copies of the sources for each version of torch, and the table of what was found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import programs
import pytest
import torches
from check_rows import known_rows

ROOT = Path(__file__).resolve().parents[3]


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
    page = (ROOT / "docs" / "versions.md").read_text()
    found = known_rows(torches.TABLE, torches.COLUMNS)
    assert set(found) <= set(torches.torch_versions())
    for version in torches.torch_versions():
        row = found.get(version)
        line = f"| {version} | not run yet | |" if row is None else f"| {version} | {row['date']} | {row['result']} |"
        assert line in page, line
