"""Makes an archive of the C++ library, for programs without Python: shardwise-VERSION-torchMINOR-MACHINE.tar.gz.

usage: archive.py [FOLDER]    where it is put; default: dist/

It has lib, include, the package for CMake, LICENSE and NOTICE. The library is the one that wheels.py builds.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tarfile
from pathlib import Path

from probe_python import found_torch, minor, torch_folder
from wheels import ROOT, library_folder, run


def main() -> int:
    torch_minor = minor(found_torch())
    cmake, ninja = (os.environ.get(f"SHARDWISE_{name.upper()}", name) for name in ("cmake", "ninja"))
    build = library_folder()
    if not (build / "CMakeCache.txt").exists():
        run(cmake, "-S", ROOT, "-B", build, "-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DSHARDWISE_TORCH_DIR={torch_folder()}", "-DSHARDWISE_BUILD_PYTHON=OFF")  # fmt: skip
    run(cmake, "--build", build, "--target", "shardwise")
    name = f"shardwise-{(ROOT / 'VERSION').read_text().strip()}-torch{torch_minor}-{platform.machine()}"
    content = ROOT / "build" / "archive" / name
    shutil.rmtree(content, ignore_errors=True)
    run(cmake, "--install", build, "--component", "shardwise", "--prefix", content)
    for file in ("LICENSE", "NOTICE"):
        shutil.copy(ROOT / file, content)
    folder = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist"
    made = folder.resolve() / f"{name}.tar.gz"
    made.parent.mkdir(exist_ok=True)
    with tarfile.open(made, "w:gz") as archive:
        archive.add(content, name)
    print(f"{made}  {made.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
