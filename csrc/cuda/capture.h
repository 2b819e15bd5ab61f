#pragma once

#include <c10/core/Stream.h>

namespace shardwise::cuda {

/// Whether what is issued on the stream is captured into a graph. The streams of newer torches can tell; with older
/// ones the CUDA runtime is asked, if this build has one.
bool is_capturing(const c10::Stream& stream);

} // namespace shardwise::cuda
