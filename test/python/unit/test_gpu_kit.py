"""The kit for a machine with a GPU: what it is refused for, where it goes, and NCCL for one architecture."""

from __future__ import annotations

import hashlib
import json
import struct
import sys

import gpu_kit
import on_gpu_steps as steps
import pytest

PYTHON = "{}.{}".format(*sys.version_info)
TORCH = gpu_kit.importlib.metadata.version("torch").partition("+")[0]


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """Makes a small one for a tree of its own, with other words in its manifest, and unpacks it there."""
    tree, folder = tmp_path / "tree", tmp_path / "kit"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc/a.cpp").write_text("int a;")
    folder.mkdir()
    monkeypatch.setattr(gpu_kit, "ROOT", tree)
    monkeypatch.setattr(gpu_kit, "KIT", tree / "build/kit")
    monkeypatch.setattr(gpu_kit, "first_line", lambda *_: "9.0")
    (tmp_path / "built").write_text("built")
    names = ("build/kit/test/cpp/rank_tests", "python/shardwise/lib/libshardwise.so")
    gpu_kit.pack(dict.fromkeys(names, tmp_path / "built"), folder / "kit.tar.xz")

    def unpacked(**words):
        sha256 = {"kit.tar.xz": hashlib.sha256((folder / "kit.tar.xz").read_bytes()).hexdigest()}
        manifest = {"commit": "0123456789", "sources": gpu_kit.sources_of(tree), "Python": PYTHON, "torch": TORCH,
                    "architecture": "90", "sha256": sha256, **words}  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return gpu_kit.unpack(folder)

    return tree, unpacked


def test_it_is_a_build_folder_of_its_own_and_the_next_build_installs_its_own(kit):
    tree, unpacked = kit
    stale, stamp = tree / "build/kit/stale", tree / "build/dev/installed.stamp"
    for path in (stale, stamp):
        path.parent.mkdir(parents=True)
        path.touch()
    environment = unpacked()
    assert environment["SHARDWISE_BUILD_DIR"] == "build/kit"
    assert environment["LD_LIBRARY_PATH"].startswith(f"{tree}/python/shardwise/lib:")
    assert environment["PYTHONPATH"].startswith(f"{tree}/python")
    assert (tree / "build/kit/test/cpp/rank_tests").exists() and (
        tree / "python/shardwise/lib/libshardwise.so"
    ).exists()
    assert not stale.exists() and not stamp.exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"sha256": {"kit.tar.xz": "0"}}, "is not the file that the kit was made with"),
        ({"Python": "3.9"}, f"for Python 3.9 with torch {TORCH}; this is Python {PYTHON}"),
        ({"torch": "2.8.0"}, f"with torch 2.8.0; this is Python {PYTHON} with torch {TORCH}"),
        ({"architecture": "80"}, "of the architecture 80; this one is of 90. .*ARCH=90"),
    ],
)
def test_what_it_is_not_for_is_said_before_anything_is_unpacked(kit, words, error):
    tree, unpacked = kit
    with pytest.raises(SystemExit, match=error):
        unpacked(**words)
    assert not (tree / "build").exists()


def test_one_of_other_sources_says_so(kit, capsys):
    _, unpacked = kit
    unpacked()
    assert "OTHER SOURCES" not in capsys.readouterr().out
    unpacked(sources="others")
    assert "THE KIT IS OF OTHER SOURCES than these: of commit 012345678" in capsys.readouterr().out


@pytest.mark.parametrize("has_kit", [False, True])
def test_only_with_a_kit_nothing_is_built(has_kit, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(steps, "BUILD", gpu_kit.KIT if has_kit else gpu_kit.ROOT / "build/dev")
    monkeypatch.setattr(steps.Place, "run", lambda _, command, **__: ran.append(command) or "")
    steps.build((), ("shardwise",), steps.Place("build_library", "cuda", tmp_path))
    assert len(ran) == (0 if has_kit else 1)


def test_nccl_keeps_the_code_of_one_architecture(tmp_path):
    def entry(arch, code):
        header = struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch) + bytes(32)
        return header + code

    def library(*entries):
        body = b"".join(entries)
        return b"ELF" + gpu_kit.MARK + struct.pack("<HHQ", 1, 16, len(body)) + body + b"data"

    file = tmp_path / "lib.so"
    file.write_bytes(library(entry(80, b"a" * 16), entry(90, b"b" * 24)) + library(entry(100, b"c" * 8)))
    gpu_kit.keep_one_architecture(file, 90)
    kept = library(entry(80, bytes(16)), entry(90, b"b" * 24)) + library(entry(100, bytes(8)))
    assert file.read_bytes() == kept
