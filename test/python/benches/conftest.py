"""Lets tests import the modules of benchmarks."""

import bench_modules  # noqa: F401
