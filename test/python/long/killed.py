"""A rank of examples/python/resume.py that a life of torchrun's may end at any time: killed.py LIVES FOLDER

In each life but the last, one rank is killed and training would never end: by turns at any time, and soon after some
optimizer step, which it comes to however slow the machine is. The last life trains ten steps more than the newest
checkpoint has.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import threading
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "python" / "resume.py"


def kill_after(seconds: float) -> None:
    killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()


def kill_after_steps(steps: int, seconds: float) -> None:
    left = iter(range(steps - 1, -1, -1))

    def count(*_: object) -> None:
        if next(left, None) == 0:
            kill_after(seconds)

    register_optimizer_step_post_hook(count)


def main() -> None:
    lives, folder = int(sys.argv[1]), Path(sys.argv[2])
    life, rank, world = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    newest = max((int(each.parent.name[5:]) for each in folder.glob("step-*/.metadata")), default=0)
    steps = newest + 10
    if life < lives:
        steps = 1000000
        chance = random.Random(life)
        if rank == chance.randrange(world):
            kill_after(chance.uniform(0, 5)) if life % 2 else kill_after_steps(
                chance.randrange(6, 12), chance.random() / 10
            )
    # As if the example had asked for our back end.
    start = dist.init_process_group
    dist.init_process_group = lambda **options: start("shardwise", **options)
    sys.path.insert(0, str(PROGRAM.parent))
    words = ["--every", "5", "--checkpoints", str(folder), "--out", str(folder), "--steps", str(steps)]
    sys.argv = [str(PROGRAM), *words]
    runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    main()
