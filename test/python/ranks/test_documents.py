"""The Python code of the pages runs as it stands, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import testing

DOCS = Path(__file__).resolve().parents[3] / "docs"
#: Blocks that begin with ```py need more than a page can show.
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "```python\n" in page.read_text()]


def run_page(_: int, code: str) -> None:
    exec(compile(code, "<page>", "exec"), {})
    dist.barrier()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_runs(page: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    testing.run_ranks(2, run_page, code)


def test_pages_have_code() -> None:
    assert {"getting-started", "from-ddp", "from-fsdp2", "choosing", "checkpoints"} <= {page.stem for page in PAGES}
