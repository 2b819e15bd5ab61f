#pragma once

#include <torch/python.h>

/// Makes our optimizers known to Python, for comparisons with Python's own.
void bind_optimizers(pybind11::module_& module);
