#pragma once

#include "pipeline/table.h"

namespace shardwise::pipeline {

// All of these raise ValueError for less than one stage on a rank, or microbatch. With stages_per_rank, stage s
// is on rank s % ranks. Each stage takes the microbatches in order, forward and backward. Idle times are those of equal
// stages and instant transfers.

/// All forwards, then all backwards. One stage on a rank, which holds all activations at once. A rank is idle for
/// (ranks - 1) / (microbatches + ranks - 1) of the time.
SHARDWISE_API Table gpipe(int ranks, int microbatches);

/// 1F1B: as few forwards ahead as keep the last rank busy, then forward and backward in turn. One stage on a rank; rank
/// r holds at most ranks - r activations. As fast as gpipe().
SHARDWISE_API Table one_forward_one_backward(int ranks, int microbatches);

/// Breadth first: all microbatches forward through one stage of the rank after the other, then all backward. A rank
/// holds the activations of all of its stages at once. It is idle as long as interleaved().
SHARDWISE_API Table looped_bfs(int ranks, int stages_per_rank, int microbatches);

/// Interleaved 1F1B: a rank takes one round of microbatches through all of its stages before the next round. Rounds are
/// as equal as they can be, none shorter than there are ranks, unless there are fewer microbatches; longer ones come
/// first. With rounds of up to n, rank r holds at most (stages_per_rank - 1) * n + 2 * (ranks - 1 - r) + 1 activations.
/// With a microbatch for each rank, a rank is idle for (ranks - 1) / (stages_per_rank * microbatches + ranks - 1) of
/// the time.
SHARDWISE_API Table interleaved(int ranks, int stages_per_rank, int microbatches);

/// As interleaved(), with the backward in halves. The halves on the weights wait, on later ranks longer, so that those
/// on the inputs come to the ranks before sooner. A rank holds at most (stages_per_rank - 1) * n + ranks activations.
/// If the halves take as long as a forward, it is idle for a third of the time that it is with interleaved().
SHARDWISE_API Table interleaved_zero_bubble(int ranks, int stages_per_rank, int microbatches);

/// ZBV: two stages on a rank, r and 2 * ranks - 1 - r, so the last stage is where the first is, and the backward begins
/// early. The halves on the weights fill the gaps. A rank holds at most 2 * ranks activations. If the halves take as
/// long as a forward, a rank never waits between its first and its last action, given 2 * ranks - 1 microbatches or
/// more.
SHARDWISE_API Table zero_bubble_v(int ranks, int microbatches);

/// DualPipeV: stages as in zero_bubble_v(). In the long middle part, each forward of one stage is followed by a
/// backward of the other one, for programs that overlap the two. A rank holds at most 2 * ranks + 1 activations. Raises
/// ValueError for fewer microbatches than stages.
SHARDWISE_API Table dual_pipe_v(int ranks, int microbatches);

} // namespace shardwise::pipeline
