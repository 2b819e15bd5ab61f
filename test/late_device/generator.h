#pragma once

#include <ATen/core/Generator.h>

namespace late {

/// The default generator of a device, and new ones. Their state is a seed and how many operations drew numbers.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
/// A generator for the next operation that draws from this one; of the current device if it is undefined.
at::Generator draw(const std::optional<at::Generator>& generator);

} // namespace late
