"""Two hosts, as far as one machine can be two: network and PID namespaces, a cable between, and a torchrun in each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import PACKAGES, ROOT, torchrun

TRAIN = ROOT / "examples" / "python" / "train.py"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, of the addresses 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root, and the program ip (Debian, Ubuntu: iproute2)")
    names = [f"sw{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def started(host: str, number: int, records: Path, *program: str) -> subprocess.Popen[str]:
    """torchrun on one of the hosts; the first one serves the store."""
    away = ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "10.77.0.1:29400"]
    who = ["--node-rank", str(number), "--local-addr", f"10.77.0.{number + 1}", "--rdzv-conf", f"is_host={1 - number}"]
    variables = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire"}
    variables = {**os.environ, **variables, "SHARDWISE_RECORD": str(records)}
    words = [*away, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *meeting, *who, *program]
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_of_two_hosts_train_as_those_of_one(hosts: list[str], tmp_path: Path) -> None:
    # In different PID namespaces, where numbers of processes may be the same.
    records = tmp_path / "records"
    running = [started(host, number, records, str(TRAIN)) for number, host in enumerate(hosts)]
    try:
        outputs = [each.communicate(timeout=240) for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], outputs
    assert len(list(records.glob("*"))) == 4, list(records.glob("*"))
    alone = torchrun(4, TRAIN)
    assert len(alone.splitlines()) == 4
    assert "".join(printed for printed, _ in outputs) == alone
