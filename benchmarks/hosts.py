"""The suite `hosts`: steps of ranks on two hosts with a slow link between, as far as one machine can be two."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import steps
from figures import Figure
from turns import Program, ratio, sent_bytes, started, take_turns

#: Of each host's link.
MEGABITS = 200
SHORT = (steps.Size(layers=2, width=64, heads=2, world=4, rounds=1, steps=1), ("Python replicate",))
FULL = (
    steps.Size(layers=4, width=256, heads=8, world=4, rounds=7, steps=2),
    ("Python replicate", "Python fully_shard", "Python torch_replicate", "Python fsdp2"),
)
LINK = "cable"


@dataclass(frozen=True)
class Host:
    """Network and PID namespaces that last as long as a process in them."""

    process: int

    def inside(self) -> list[str]:
        """What a command begins with to run there."""
        return ["nsenter", "--target", str(self.process), "--net", "--pid", "--mount"]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def missing() -> str:
    """Why there can be no two hosts here; empty if they can be."""
    programs = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if programs:
        return f"the programs {', '.join(programs)} are missing"
    return "" if os.geteuid() == 0 else "network namespaces take root"


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        hosts = []
        for _ in range(2):
            words = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; cat"]
            holder = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(holder.kill)
            assert holder.stdout
            if not holder.stdout.readline():
                raise OSError("no namespaces of its own could be made for a host")
            child = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
            hosts.append(Host(int(child)))
        first, second = (["name", LINK, "netns", str(host.process)] for host in hosts)
        run("ip", "link", "add", *first, "type", "veth", "peer", *second)
        for number, host in enumerate(hosts, start=1):
            run(*host.inside(), "ip", "addr", "add", f"10.77.0.{number}/24", "dev", LINK)
            for device in (LINK, "lo"):
                run(*host.inside(), "ip", "link", "set", device, "up")
            limit = ["rate", f"{MEGABITS}mbit", "burst", "256kb", "latency", "100ms"]
            run(*host.inside(), "tc", "qdisc", "add", "dev", LINK, "root", "tbf", *limit)
        yield hosts


def measure(build: Path, size: steps.Size, hosts: Sequence[Host], names: Sequence[str]) -> list[Program]:
    def words(name: str, store: Path) -> list[str]:
        return steps.command(name, build, size, store, None)

    def before(rank: int) -> list[str]:
        return hosts[rank * len(hosts) // size.world].inside()

    def link_bytes() -> int:
        return sum(sent_bytes(LINK, str(host.process)) for host in hosts)

    environment = {"GLOO_SOCKET_IFNAME": LINK, "SHARDWISE_SHARED_MEMORY": "on"}
    with started(words, (steps.DDP, *names), size.world, environment, before, link_bytes) as programs:
        take_turns(programs, size.rounds, size.steps)
        return programs


def figures(programs: Sequence[Program]) -> Iterator[Figure]:
    ddp = programs[0]
    parameters = ddp.most("parameter_bytes")
    about = f"{parameters / 4e6:.1f} M, 2 hosts of 2 ranks, {MEGABITS} Mbit/s"
    for program in programs:
        name = f"{about}: {steps.NAMES.get(program.name, program.name)}"
        # Both ways at the same time.
        seconds = program.wire_bytes() / 2 * 8 / MEGABITS / 1e6
        note = f"least {program.least('seconds'):.3g} s; the link alone takes {seconds:.3g} s"
        yield Figure("hosts", f"{name}: step", ratio(program, ddp, "seconds"), "x DDP", note)
        yield Figure("hosts", f"{name}: over the link", program.wire_bytes() / parameters, "P a step")


def suite(build: Path, size: steps.Size, names: Sequence[str]) -> Iterator[Figure]:
    problem = missing()
    if problem:
        print(f"hosts  nothing was measured: {problem}", flush=True)
        return
    with two_hosts() as hosts:
        yield from figures(measure(build, size, hosts, names))
