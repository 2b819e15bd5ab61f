"""Lets tests import the modules of benchmarks."""

import sys

from checkout import ROOT

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "python")]
