// The headers that most of the library includes; found by the compiler, never included by hand.
#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
