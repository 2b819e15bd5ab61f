"""The library alone: installed by CMake, without Python, and ranks started by a shell, as getting-started.md shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import torch
from checkout import ROOT

PAGE = (ROOT / "docs" / "getting-started.md").read_text().partition("## C++ without Python")[2]
TORCH = Path(torch.__file__).parent


def run(command: str, folder: Path, limit: int = 600, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        ["sh", "-ec", command], cwd=folder, env={**kept, **variables}, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_libtorch_without_python(tmp_path: Path) -> None:
    """Headers and libraries in a folder, as in an archive of LibTorch; built, installed and used by a program."""
    libtorch = tmp_path / "libtorch"
    (libtorch / "lib").mkdir(parents=True)
    for name in ("include", "share"):
        (libtorch / name).symlink_to(TORCH / name)
    for library in (TORCH / "lib").iterdir():
        if "python" not in library.name:
            (libtorch / "lib" / library.name).symlink_to(library)
    # An archive has CUDA's libraries among its own; Python's packages have them beside torch.
    for library in (TORCH.parent / "nvidia").glob("*/lib/*.so*"):
        (libtorch / "lib" / library.name).symlink_to(library)
    (configure, build, install) = re.findall(
        r"```sh\n(cmake -S .*?)\n(cmake --build.*?)\n(cmake --install.*?)\n```", PAGE
    )[0]
    options = re.findall(r'`(-DCMAKE_PREFIX_PATH="\$PREFIX".*?)`', PAGE)[0]
    launch = re.findall(r"```sh\n(for rank.*?)```", PAGE, re.DOTALL)[0]
    variables = {"PREFIX": str(tmp_path / "prefix"), "TORCH": str(libtorch), "PATH": "/usr/bin:/bin"}
    place = f"'{tmp_path}/build'"
    configure = configure.replace("-S .", f"-S '{ROOT}'").replace("build/cpp", place)
    run(f"{configure} -DSHARDWISE_CUDA=off", tmp_path, **variables)
    run(build.replace("build/cpp", place) + " -j2", tmp_path, limit=3000, **variables)
    run(install.replace("build/cpp", place), tmp_path, **variables)
    run(f"cmake -S '{ROOT}/examples/train' -B . {options} && cmake --build .", tmp_path, **variables)
    # A port of its own: another job may have the one of the page.
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    printed = run(launch.replace("29400", port), tmp_path)
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert printed == shown
