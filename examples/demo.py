"""Trains a small GPT on several ranks, checks its losses against one process, and draws what happened.

The ranks are started by torchrun.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from corpus import write_corpus
from picture import write_picture
from training import DemoError, Memory, largest_difference, read_memory, read_records, read_training

MODES = ("replicate", "fully_shard")
#: Two pipeline stages, on two replicas, each divided between two ranks.
THREE_D, THREE_D_RANKS, THREE_D_REPLICAS = "3d", 8, 2
ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / (os.environ.get("SHARDWISE_BUILD_DIR") or "build/dev") / "examples" / "cpp" / "gpt"
NEXT = "examples/cpp/pretrain: checkpoints, and a run that goes on by itself when ranks are killed"
LIMIT = 1e-4
CHECKED_STEPS = 10
#: Of the mode that is not trained: enough for its memory to be what it stays at.
MEASURED_STEPS = 4
#: Of 2 ranks: about a minute on two cores.
STEPS = 200


def main() -> int:
    try:
        run(parse_arguments())
    except DemoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--front", choices=["cpp", "python"], default="cpp", help="the language of the training (default: cpp)"
    )
    parser.add_argument(
        "--mode",
        choices=(*MODES, THREE_D),
        default="replicate",
        help="every rank has the whole model, a shard of every parameter, or (3d) a part of some layers' shards, on 8 "
        "ranks; all but the first from C++ only",
    )
    parser.add_argument("--ranks", type=positive, help="processes that train together (default: 2, for 3d: 8)")
    parser.add_argument("--steps", type=positive, help="default: 200 for 2 ranks, fewer for more, for the same time")
    parser.add_argument("--batch", type=positive, default=8, help="sequences a rank and step (default: 8)")
    parser.add_argument("--short", action="store_true", help="12 steps of 2 sequences: to see that everything works")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reference-seed", type=int, help="another seed for the one process: the check must then fail")
    parser.add_argument("--binary", type=Path, default=BINARY, help=f"the C++ program (default: {shown(BINARY)})")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "demo", help="where results go (default: build/demo)"
    )
    options = parser.parse_args()
    if options.front == "python" and options.mode != "replicate":
        raise DemoError(
            f"demo: the program in Python has no mode {options.mode}. Take FRONT=cpp (--front cpp) for it, or "
            "MODE=replicate (--mode replicate)."
        )
    usual = THREE_D_RANKS if options.mode == THREE_D else 2
    options.ranks = options.ranks or usual
    if options.mode == THREE_D and options.ranks != usual:
        raise DemoError(f"demo: the mode 3d takes {usual} ranks, not {options.ranks}. Leave RANKS (--ranks) out.")
    options.steps = options.steps or max(CHECKED_STEPS, 2 * STEPS // max(2, options.ranks))
    if options.short:
        options.steps, options.batch = 12, 2
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def run(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    program = find_program(options)
    ranks = limit_ranks(options.ranks)
    replicas, called = replicas_of(options.mode, ranks)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.jsonl"), *out.glob("*.json"), *out.glob("*/*.json*"), out / "training.svg"]:
        old.unlink(missing_ok=True)
    corpus = out / "corpus.txt"
    size = write_corpus(corpus)
    print(f"The text: {size / 1e6:.1f} MB of the Python standard library's sources.\n", flush=True)

    common = ["--corpus", str(corpus), "--batch", str(options.batch)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    start += ["--no-python", *program, *common, "--seed", str(options.seed)]
    # The ranks share the cores; more threads than cores would only wait for each other.
    environment = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    show_and_run(
        [*start, "--out", str(out), "--steps", str(options.steps), *mode_of(options, options.mode)], environment
    )
    training = read_training(out, ranks, options.steps)

    steps = min(CHECKED_STEPS, options.steps)
    print(f"\nThe first {steps} steps again, in one process on the batches of all {called}:", flush=True)
    seed = options.seed if options.reference_seed is None else options.reference_seed
    if training.facts.device == "cpu" and has_gpu():
        environment["CUDA_VISIBLE_DEVICES"] = ""
    again = ["--out", str(out), "--seed", str(seed), "--steps", str(steps), "--reference-of", str(replicas)]
    show_and_run([*program, *common, *again], environment)
    reference = read_records(out / "reference.jsonl", steps)

    memory = memory_of_both(options, start, environment)
    losses = training.mean_losses
    difference, step = largest_difference(losses[:steps], [record["loss"] for record in reference])
    agreement = f"within {difference:.1e} of" if difference > 0 else "equal to those of"
    checked = f"Losses of the first {steps} steps {agreement} one process."
    front = {"cpp": "C++", "python": "Python"}[options.front]
    picture = out / "training.svg"
    write_picture(picture, training, reference, front, checked, memory)

    print(memory_table(memory), end="")
    rate = training.tokens_per_second
    print(f"\nloss     {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps, {rate:.0f} tokens/s in all")
    verdict = f"largest relative difference from one process {difference:.1e}, at step {step} (limit {LIMIT:.0e})"
    print(f"check    {verdict}: {'passed' if difference <= LIMIT else 'FAILED'}")
    print(f"picture  {shown(picture)}")
    print(f"time     {time.monotonic() - begin:.0f} s\nnext     {NEXT}", flush=True)
    if difference > LIMIT:
        raise DemoError("demo: the ranks did not train as one process would.")


def replicas_of(mode: str, ranks: int) -> tuple[int, str]:
    """How many batches a step takes, and what the ranks that draw them are called."""
    if mode != THREE_D:
        return ranks, "ranks"
    if ranks < THREE_D_RANKS:
        raise DemoError(
            f"demo: the mode 3d takes {THREE_D_RANKS} ranks. Set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
        )
    return THREE_D_REPLICAS, "replicas"


def memory_of_both(options: argparse.Namespace, start: Sequence[str], environment: dict[str, str]) -> dict[str, Memory]:
    """What rank 0 holds in the mode that was trained, and in the other one, where both are there."""
    if options.front != "cpp" or options.mode not in MODES:
        return {}
    other = MODES[1 - MODES.index(options.mode)]
    print(f"\nA few steps with {other}, for its memory:", flush=True)
    (options.out / other).mkdir(exist_ok=True)
    few = ["--out", str(options.out / other), "--steps", str(MEASURED_STEPS), *mode_of(options, other)]
    show_and_run([*start, *few], environment)
    measured = {options.mode: read_memory(options.out), other: read_memory(options.out / other)}
    return {mode: measured[mode] for mode in MODES}


def mode_of(options: argparse.Namespace, mode: str) -> list[str]:
    """The argument that chooses the mode, of the program that has one."""
    return ["--mode", mode] if options.front == "cpp" else []


def memory_table(memory: Mapping[str, Memory]) -> str:
    if not memory:
        return ""
    columns = ("parameters", "gradients", "optimizer", "other", "all", "peak")
    lines = ["\nMiB of tensors that rank 0 holds between steps, and at the peak of one:"]
    lines.append(f"{'':12}" + "".join(f"{column:>12}" for column in columns))
    for mode, held in memory.items():
        lines.append(f"{mode:12}" + "".join(f"{getattr(held, column):12.1f}" for column in columns))
    return "\n".join(lines) + "\n"


def find_program(options: argparse.Namespace) -> list[str]:
    needed = {"torch": "pip install torch==2.11.0"}
    if options.front == "python":
        needed["shardwise"] = "pip install --no-build-isolation -e ."
    for module, remedy in needed.items():
        if importlib.util.find_spec(module) is None:
            raise DemoError(f"demo: {sys.executable} has no {module}. Run `make demo`, or install it: {remedy}")
    if options.front == "python":
        return [sys.executable, str(ROOT / "examples" / "python" / "gpt.py")]
    binary: Path = options.binary
    if not binary.is_file():
        raise DemoError(
            f"demo: there is no program at {shown(binary)}. Run `make demo`, or configure with "
            "-DSHARDWISE_BUILD_EXAMPLES=ON, build the target gpt, and give its path with --binary."
        )
    return [str(binary.resolve())]


def limit_ranks(ranks: int) -> int:
    """One rank a GPU: NCCL takes no more. Without a GPU any number goes."""
    if not has_gpu():
        return ranks
    count = "import torch; print(torch.cuda.device_count())"
    gpus = int(subprocess.run([sys.executable, "-c", count], check=True, capture_output=True, text=True).stdout)
    if gpus == 0 or ranks <= gpus:
        return ranks
    print(
        f"{ranks} ranks were asked for, and NCCL needs a GPU for each: going on with {gpus}, the number of GPUs here. "
        "Set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU."
    )
    return gpus


def has_gpu() -> bool:
    """Without asking torch, whose import takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def show_and_run(command: Sequence[str], environment: dict[str, str]) -> None:
    """Runs a command with its output on ours, after printing it as one could type it."""
    words = [f"{name}={value}" for name, value in environment.items()]
    words += [shlex.quote(shown(Path(word)) if os.path.isabs(word) else word) for word in command]
    lines = [words[0]]
    room = shutil.get_terminal_size((100, 24)).columns - 4
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > room:
            lines.append("   " + word)
        else:
            lines[-1] += " " + word
    print("$ " + " \\\n".join(lines), flush=True)
    done = subprocess.run(command, env={**os.environ, **environment})
    if done.returncode != 0:
        raise DemoError(f"demo: the command above ended with exit code {done.returncode}; its own error is above.")


def shown(path: Path) -> str:
    """As seen from the current folder where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


if __name__ == "__main__":
    sys.exit(main())
