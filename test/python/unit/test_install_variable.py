"""SHARDWISE_INSTALL=1 calls shardwise.install() in programs that know nothing of it, and says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from broken_package import BrokenPackage
from checkout import PACKAGES, python
from install_programs import TOLD, run
from installation import Environment


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder in whose place the package seems to be installed: Python reads the .pth file beside it."""
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(PACKAGES)!r})\n")
    return tmp_path


STATE = """
import sys
print([name for name in ("torch", "shardwise", "_shardwise_install") if name in sys.modules], len(sys.meta_path))
"""


def test_nothing_happens_where_the_variable_is_not_set(site, monkeypatch):
    monkeypatch.delenv("SHARDWISE_INSTALL", raising=False)
    usual = run(STATE, common=False)
    assert usual.startswith("[] ")
    assert run(STATE, common=False, PYTHONPATH=str(site)) == usual
    for value in ("", "0", "false", "No", "off"):
        assert run(STATE, common=False, PYTHONPATH=str(site), SHARDWISE_INSTALL=value) == usual, value
    run("import torch.distributed.fsdp\ncheck_torchs()", PYTHONPATH=str(site), SHARDWISE_INSTALL="0")


def test_the_variable_imports_nothing_at_the_start(site):
    said = run(STATE, common=False, PYTHONPATH=str(site), SHARDWISE_INSTALL="1")
    assert said.startswith("['_shardwise_install'] ")


FIRST_IMPORTS = [
    "import torch.distributed.fsdp",
    "from torch.distributed.fsdp import fully_shard\nassert fully_shard.__module__ == 'shardwise._fully_shard'",
    "import torch.distributed.fsdp._fully_shard._fully_shard",
    "import torch.distributed._composable.fsdp",
    "import torch.distributed._composable.fsdp.fully_shard",
    "from torch.distributed._composable.replicate_with_fsdp import replicate\n"
    "assert replicate.__module__ == 'shardwise._replicate'",
    "import torch.distributed.pipelining",
    "import torch._dynamo",
    "import shardwise\nshardwise.fully_shard",
    "import shardwise\nshardwise.replicate\nshardwise.install()",
    "import shardwise\nshardwise.install()",
]


def test_the_variable_installs_whatever_comes_first(site):
    # Forks, since all of them need torch itself.
    said = run(
        f"""
for first in {FIRST_IMPORTS!r}:
    if os.fork() == 0:
        status = 1
        try:
            assert "torch.distributed.fsdp" not in sys.modules and "shardwise" not in sys.modules
            exec(first, {{}})
            check_ours()
            import shardwise
            shardwise.uninstall()
            check_torchs()
            status = 0
        finally:
            if status:
                import traceback
                traceback.print_exc()
            os._exit(status)
    print(os.wait()[1], first.splitlines()[0])
""",
        # Whoever calls install() knows it.
        told=len(FIRST_IMPORTS) - 1,
        PYTHONPATH=str(site),
        SHARDWISE_INSTALL="1",
    )
    assert said.splitlines() == [f"0 {first.splitlines()[0]}" for first in FIRST_IMPORTS]


def test_the_first_rank_alone_tells(site):
    program = """
import multiprocessing, sys, torch.distributed.fsdp
if __name__ == "__main__" and len(sys.argv) > 1:
    process = multiprocessing.get_context("spawn").Process(target=print, args=("a child",))
    process.start()
    process.join()
"""
    file = site / "program.py"
    file.write_text(program)
    for rank, words, told in (("0", ["with a child"], [TOLD]), ("1", [], [])):
        done = python(file, *words, PYTHONPATH=str(site), SHARDWISE_INSTALL="1", RANK=rank)
        assert (done.stdout.splitlines(), done.stderr.splitlines()) == (["a child"][: len(words)], told)


def test_uninstall_before_the_import_lasts(site):
    program = "import shardwise\nshardwise.uninstall()\nimport torch.distributed.fsdp\ncheck_torchs()"
    run(program, PYTHONPATH=str(site), SHARDWISE_INSTALL="1")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("not built", "is not built. Build it: "),
        ("only the .pth file", "No module named '_shardwise_install'"),
        ("raises", "of no use"),
    ],
)
def test_a_broken_package_breaks_no_interpreter(tmp_path, broken, told):
    if broken == "not built":
        BrokenPackage(tmp_path, built=False)
    if broken == "raises":
        (tmp_path / "shardwise").mkdir()
        (tmp_path / "shardwise" / "__init__.py").write_text("raise RuntimeError('of\\nno use')\n")
    for name in ("shardwise_install.pth", "_shardwise_install.py")[: 1 if broken == "only the .pth file" else 2]:
        (tmp_path / name).write_text((PACKAGES / name).read_text())
    (tmp_path / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(tmp_path)!r})\n")
    # This Python may have the checkout on its path.
    clean = Environment.create(tmp_path / "environment")
    result = subprocess.run(
        [clean.python, "-c", "from torch.distributed.fsdp import fully_shard; print(fully_shard.__module__)"],
        env={**clean.variables, "PYTHONPATH": str(tmp_path), "SHARDWISE_INSTALL": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "torch.distributed.fsdp\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("shardwise: SHARDWISE_INSTALL is set, but torch's own functions stay: ")
    assert told in line
