"""python -m shardwise doctor: what it prints where all is well, and where something is not."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_package import BUILT_MINOR, PACKAGE, BrokenPackage
from checkout import ROOT, output_of
from installation import Environment

import shardwise
from shardwise import _abilities, _build_info, _doctor
from shardwise.__main__ import main

NEEDED = {"import shardwise", "replicate() on CPUs (Gloo)", "ranks from the environment"}
LAUNCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def launch(monkeypatch):
    """Sets the variables of a launch; None removes one."""

    def change(**variables: str | None) -> _doctor.Ability:
        for name, value in {**LAUNCH, "LOCAL_RANK": None, **variables}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return ability(_doctor.examine(), "ranks from the environment")

    return change


def ability(report: _doctor.Report, name: str) -> _doctor.Ability:
    (found,) = [each for each in report.abilities if each.name == name]
    return found


def works(report: dict[str, Any]) -> dict[str, bool]:
    return {each["name"]: each["works"] for each in report["abilities"]}


def test_json_report_of_this_machine():
    report = json.loads(output_of("-m", "shardwise", "doctor", "--json"))
    assert report["usable"] is True
    versions = report["versions"]
    assert versions["shardwise"] == f"{shardwise.__version__} in {PACKAGE}"
    assert versions["built against torch"] == _build_info.TORCH_VERSION
    assert versions["torch"].startswith(f"{torch.__version__} in ")
    assert versions["Python"] == "{}.{}.{} at {}".format(*sys.version_info[:3], sys.executable)
    assert report["back ends"]["Gloo"] == "in torch"
    assert ("cuda:0" in report["devices"]) == torch.cuda.is_available()
    assert report["environment"]["RANK"] == "not set"
    assert {name for name, here in works(report).items() if not here}.isdisjoint(NEEDED)
    assert not works(report)["replicate() on GPUs (NCCL)"], "no GPU has run it yet"
    assert works(report)["C++ programs with find_package(shardwise)"]
    assert all(each["works"] or (each["reason"] and each["remedy"]) for each in report["abilities"])


def test_text_report_says_the_same(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["shardwise", "doctor"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "  yes replicate() on CPUs (Gloo)\n" in shown
    assert f"  built against torch  {_build_info.TORCH_VERSION}\n" in shown
    assert "unknown (" not in shown


def test_a_refused_torch_is_explained_and_fails(tmp_path):
    package = BrokenPackage(tmp_path)
    folder = package.add_torch("2.9.0")
    result = package.run("-m", "shardwise", "doctor", "--json")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert report["usable"] is False
    assert report["versions"]["torch"] == f"2.9.0 in {folder}"
    (broken,) = [each for each in report["abilities"] if each["name"] == "import shardwise"]
    assert f"built against torch {BUILT_MINOR}." in broken["reason"]
    assert f"torch 2.9.0 was found in {folder}" in broken["reason"]


def test_an_extension_that_cannot_be_loaded_is_explained(tmp_path):
    package = BrokenPackage(tmp_path)
    package.add_torch(_build_info.TORCH_VERSION)
    result = package.run("-m", "shardwise", "doctor")
    assert result.returncode == 1, result.stderr
    assert "  NO  import shardwise\n" in result.stdout
    assert "the extension module could not be loaded" in result.stdout
    assert "Build it again: " in result.stdout


def test_only_the_doctor_runs_where_the_import_is_refused(tmp_path):
    package = BrokenPackage(tmp_path)
    package.add_torch("2.9.0")
    program = tmp_path / "program"
    program.mkdir()
    (program / "__init__.py").write_text("import shardwise\n")
    (program / "__main__.py").touch()
    result = package.run("-m", "program", "shardwise", "doctor")
    assert result.returncode == 1
    assert "was built against torch" in result.stderr
    assert result.stdout == ""


def test_launch_variables_are_checked_as_the_engine_does(launch):
    assert launch().works
    assert launch(RANK=None, WORLD_SIZE=None, MASTER_ADDR=None, MASTER_PORT=None).works
    partial = launch(RANK=None, MASTER_PORT="")
    assert partial.reason == "WORLD_SIZE, MASTER_ADDR set, but not RANK, MASTER_PORT"
    assert "torchrun" in partial.remedy
    assert launch(WORLD_SIZE="two").reason == "WORLD_SIZE is 'two'; it must be a whole number from 1 to 2147483647"
    assert launch(MASTER_PORT="65536").reason == "MASTER_PORT is '65536'; it must be a whole number from 1 to 65535"
    assert launch(LOCAL_RANK="-1").reason == "LOCAL_RANK is '-1'; it must be a whole number from 0 to 2147483647"
    assert launch(RANK="2").reason == "RANK is 2, but WORLD_SIZE is 2"
    assert not _doctor.examine().usable


def test_gloo_without_an_interface_is_explained(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    report = _doctor.examine()
    gloo = ability(report, "replicate() on CPUs (Gloo)")
    assert "no-such-interface" in (gloo.reason or "")
    assert "export GLOO_SOCKET_IFNAME=" in gloo.remedy
    assert not report.usable


def test_cpp_programs_need_a_compiler_and_the_package(monkeypatch, tmp_path):
    name = "C++ programs with find_package(shardwise)"
    assert ability(_doctor.examine(), name).works
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = _doctor.examine()
    assert (ability(report, name).reason or "").startswith("'no-such-compiler' was not found")
    assert report.usable, "a Python program needs no compiler"
    monkeypatch.setattr(_abilities, "_FOLDER", tmp_path)
    assert "shardwiseConfig.cmake is missing" in (ability(_doctor.examine(), name).reason or "")


@pytest.mark.parametrize(
    ("macros", "reason"),
    [
        ("#define __GNUC__ 13\n#define __GNUC_MINOR__ 2\n", None),
        ('#define __GNUC__ 11\n#define __VERSION__ "11.4 12 13"\n', "' is g++ 11; "),
        ("#define __GNUC__ 4\n#define __clang__ 1\n", "' is not g++; "),
    ],
)
def test_the_compiler_is_the_one_that_the_readme_asks_for(monkeypatch, tmp_path, macros, reason):
    (oldest,) = re.findall(r"g\+\+ (\d+) or newer", (ROOT / "README.md").read_text())
    assert oldest == "12" and int(oldest) == _abilities.OLDEST_GCC
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncat <<'END'\n{macros}END\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = _abilities._cpp_programs()
    assert found.works == (reason is None)
    assert (reason or "") in (found.reason or "") and ("g++ 12 or newer" in found.remedy) != found.works


def test_the_variable_that_installs_is_tried(monkeypatch, tmp_path):
    """Python reads the .pth file where the package is installed; with PYTHONPATH alone it does not."""
    clean = Environment.create(tmp_path / "environment")
    for name in ("PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "executable", str(clean.python))
    found = _abilities._install_variable()
    assert found.reason == f"no shardwise_install.pth is read when {clean.python} starts, so the variable does nothing"
    assert "pip" in found.remedy and "shardwise.install()" in found.remedy
    (clean.site / "checkout.pth").write_text(f"import site; site.addsitedir({str(PACKAGE.parent)!r})\n")
    assert _abilities._install_variable().works
    (tmp_path / "_shardwise_install.py").write_text("def start():\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = f"{tmp_path / '_shardwise_install.py'} is read, which belongs to another shardwise"
    assert other in (_abilities._install_variable().reason or "")


def test_the_nccl_that_is_loaded_is_named(monkeypatch):
    def load(name):
        return SimpleNamespace(ncclGetVersion=lambda found: setattr(found._obj, "value", 91234))

    def cannot(name):
        raise OSError(name)

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for loading, said in ((load, "9.12.34; shardwise was"), (cannot, "2.28.9, with which torch was built; shardwise")):
        monkeypatch.setattr(_doctor.ctypes, "CDLL", loading)
        assert _doctor._back_ends()["NCCL"].startswith(said)


def test_gpus_beyond_those_there_are_explained(monkeypatch):
    name = "replicate() on GPUs (NCCL)"
    monkeypatch.setattr(_build_info, "WITH_NCCL", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert ability(_doctor.examine(), name).reason == "LOCAL_RANK is 2; GPUs: 2"
    # The only one is right for any rank: its launcher may show it no other.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    untried = ability(_doctor.examine(), name)
    assert untried.untried and not untried.works
    assert untried.reason == "it is built, but shardwise ran on one kind of GPU only, an H100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ability(_doctor.examine(), name).reason == "torch sees no GPU"
    monkeypatch.setattr(_build_info, "WITH_NCCL", False)
    assert ability(_doctor.examine(), name).reason == "this shardwise was built without NCCL"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ability(_doctor.examine(), name).reason == "this torch is a build without CUDA"
