#pragma once

#include "engine/front_end.h"
#include "nn/touch/touch.h"

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

namespace shardwise::nn {

// What the touch trigger refuses or explains where shards, their gradients and full copies are used: programs that
// torch would let train wrongly, or stop with a text about sizes.

/// Parameters of classes whose members are unknown, until their leaves are used.
using UnverifiedParameters = std::unordered_set<const group::Parameter*>;

[[noreturn]] void refuse_write_to_full(const engine::Unit& unit, const Touch& touch);
/// For an optimizer that was made before wrapping: its parameters are the full ones.
[[noreturn]] void refuse_absent_gradient(const engine::Unit& unit, const Touch& touch);
/// Refuses what is right on a whole parameter and wrong on its shard: random numbers, sizes of the whole, penalties
/// that are not sums, and what refuse_write_by_place() refuses.
void refuse_what_needs_the_whole(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch);
/// Refuses a write to some rows of a shard or its gradient, or by the places of elements.
void refuse_write_by_place(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch);
/// Refuses a penalty that is computed from values of this rank's shards, and is not a sum of elements.
void refuse_penalty_of_values(const Touch& touch, Local local, std::optional<int64_t> cut);
/// For a write of values that are Local::mixed.
[[noreturn]] void refuse_local_values(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch);
/// From now on a backward fails if it brings a gradient to the shard of a parameter that is still unverified.
void refuse_first_gradient(
    const group::Parameter& parameter, const std::weak_ptr<UnverifiedParameters>& unverified,
    const std::weak_ptr<engine::Unit>& unit);

/// Warns of torch::cat of shards, as in parameters_to_vector(): once for each tree.
void warn_of_concatenated_shards(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch);

/// Warns, once for the process, of a number of this rank's shards alone that the program reads.
void warn_of_local_number();

/// For an operation that torch refused and that got something computed from shards of gradients: a shard may be empty.
std::string explain_local_result(const std::string& operation);

/// For an operation that torch refused and that got a shard, or its gradient, together with something of the whole
/// parameter's sizes; empty if it did not.
std::string why_sizes_differ(const engine::Unit& unit, const group::Parameter& parameter, const Touch& touch);

/// For a batch norm that torch refused: its parameters are in the dtype to compute in, its statistics are not. Else
/// empty.
std::string why_dtypes_differ(const engine::Unit& unit, const c10::OperatorHandle& operation);

} // namespace shardwise::nn
