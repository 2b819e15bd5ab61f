"""All ways to break the engine on purpose; run.py shows that tests notice each.

test/python/unit/test_mutants.py holds that each has its place.
"""

from __future__ import annotations

from ahead import AHEAD
from checkpoints import CHECKPOINTS
from copies import COPIES
from fronts import FRONTS
from hybrid import HYBRID
from late import LATE
from lost import LOST
from meta import META
from optimizers import OPTIMIZERS
from order import ORDER
from package import PACKAGE
from precision import PRECISION
from python_front import PYTHON_FRONT
from several_meshes import MESHES
from split import SPLIT
from sums import SUMS
from surroundings import SURROUNDINGS
from transport import TRANSPORT
from traps import TRAPS

MUTANTS = [
    *SUMS,
    *COPIES,
    *ORDER,
    *FRONTS,
    *HYBRID,
    *PRECISION,
    *AHEAD,
    *META,
    *TRANSPORT,
    *LOST,
    *TRAPS,
    *SURROUNDINGS,
    *PACKAGE,
    *PYTHON_FRONT,
    *MESHES,
    *LATE,
    *CHECKPOINTS,
    *SPLIT,
    *OPTIMIZERS,
]
