#pragma once

namespace shardwise::tensor_parallel {

/// From now on operations that read a piece of a parameter work on all ranks along its axis together: linear, addmm, mm
/// and matmul with the weight or its transpose, and embedding. Views and copies of a piece are pieces. Any other
/// operation is an Error under autograd; elsewhere a piece is a tensor like any other, except that no product or
/// convolution may read it.
void watch_pieces();

} // namespace shardwise::tensor_parallel
