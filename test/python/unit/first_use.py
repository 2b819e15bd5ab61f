"""What a user does first with an installed wheel: each step does it in an environment, and looks at what comes out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from installation import ROOT, Environment

README = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
#: What the README's programs print.
(SHOWN,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
WHERE = "import shardwise; print(shardwise.__file__)"

# Nothing of it knows of shardwise. It leaves at once, for torch's own threads were seen to end a process that exits
# with "terminate called without an active exception".
PLAIN = """
import os
import torch
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(1, 1, bias=False)
fully_shard(model)
model(torch.full((1, 1), torch.distributed.get_rank() + 1.0)).sum().backward()
print(f"{fully_shard.__module__}: gradient {model.weight.grad.full_tensor().item()}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
os._exit(0)
"""


def torchrun(environment: Environment, *program: str | Path, **variables: str) -> list[str]:
    """The lines that two ranks print, sorted."""
    command = [environment.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    everything = {**environment.variables, **variables}
    result = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(result.stdout.splitlines())


def configure(environment: Environment, build: Path, *options: str) -> str | None:
    """Configures the README's program for CMake; None if it succeeds, else what CMake said, on one line."""
    command = ["cmake", "-S", str(ROOT / "examples" / "train"), "-B", str(build), *options]
    result = subprocess.run(command, env=environment.variables, capture_output=True, text=True, timeout=600)
    return None if result.returncode == 0 else " ".join(result.stderr.split())


def demo(environment: Environment, *options: str) -> None:
    picture = environment.folder / "demo.svg"
    said = environment.run(environment.python, "-m", "shardwise", "demo", "--out", picture, *options)
    assert re.search(r"^step 10  loss [23]\.\d+$", said, re.MULTILINE), said
    assert "one process: " in said and "(passed)" in said
    assert picture.read_text().count("<polyline ") == 3


def imported_from_any_folder(environment: Environment) -> None:
    for folder in (Path("/"), environment.folder, environment.site):
        found = environment.run(environment.python, "-c", WHERE, folder=folder)
        assert Path(found.strip()) == environment.site / "shardwise/__init__.py"


def doctor(environment: Environment) -> None:
    assert "what works here" in environment.run(environment.python, "-m", "shardwise", "doctor")


def python_program_of_the_readme(environment: Environment) -> None:
    program = environment.folder / "train.py"
    program.write_text(PROGRAM)
    assert torchrun(environment, program) == SHOWN.splitlines()


def cpp_program_of_the_readme(environment: Environment) -> None:
    """Each rank has data of its own: these losses follow from the mean of all ranks' gradients."""
    show = "import shardwise; print(shardwise.cmake_prefix_path)"
    prefix_path = environment.run(environment.python, "-c", show).strip()
    build = environment.folder / "train"
    assert configure(environment, build, f"-DCMAKE_PREFIX_PATH={prefix_path}") is None
    environment.run("cmake", "--build", build)
    assert torchrun(environment, "--no-python", build / "train") == SHOWN.splitlines()


def in_the_place_of_torchs_functions(environment: Environment) -> None:
    program = environment.folder / "plain.py"
    program.write_text(PLAIN)
    assert torchrun(environment, program) == ["torch.distributed.fsdp: gradient 1.5"] * 2
    ours = torchrun(environment, program, SHARDWISE_INSTALL="1")
    assert ours == ["shardwise._fully_shard: gradient 1.5"] * 2


def uninstalled(environment: Environment) -> None:
    environment.run(environment.python, "-m", "pip", "uninstall", "--yes", "shardwise")
    assert [path for path in environment.folder.rglob("*shardwise*") if environment.site in path.parents] == []
    variables = {**environment.variables, "SHARDWISE_INSTALL": "1"}
    done = subprocess.run(
        [environment.python, "-c", "print(1)"], env=variables, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("1\n", ""), "the variable is nobody's any more"


#: In this order: nothing comes after the last.
STEPS: tuple[Callable[[Environment], None], ...] = (
    imported_from_any_folder,
    doctor,
    python_program_of_the_readme,
    cpp_program_of_the_readme,
    in_the_place_of_torchs_functions,
    uninstalled,
)
