"""Two hosts, as far as one machine can be two (benchmarks/hosts.py), and a torchrun in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import PACKAGES, ROOT, torchrun

sys.path.append(str(ROOT / "benchmarks"))
from hosts import LINK, Host, missing, two_hosts

TRAIN = ROOT / "examples" / "python" / "train.py"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Of the addresses 10.77.0.1 and 10.77.0.2."""
    if problem := missing():
        pytest.skip(problem)
    with two_hosts() as made:
        yield made


def started(host: Host, number: int, records: Path, *program: str) -> subprocess.Popen[str]:
    """torchrun on one of the hosts; the first one serves the store."""
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "10.77.0.1:29400"]
    who = ["--node-rank", str(number), "--local-addr", f"10.77.0.{number + 1}", "--rdzv-conf", f"is_host={1 - number}"]
    variables = {"PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    variables = {**os.environ, **variables, "SHARDWISE_RECORD": str(records)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = [*host.inside(), *launcher, *meeting, *who, *program]
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_of_two_hosts_train_as_those_of_one(hosts: list[Host], tmp_path: Path) -> None:
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
