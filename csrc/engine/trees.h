#pragma once

#include <memory>
#include <string>
#include <vector>

namespace shardwise::engine {

class Schedule;
class Unit;

/// Has all ranks compare which of these units, all of one tree, sum their gradients in the backward that begins. Raises
/// an Error that names them if ranks differ, so that the sums that follow are the same everywhere.
void agree_on_sums(const std::vector<std::shared_ptr<Unit>>& units);

/// Has all ranks compare how many of these units, in the order of sums, have started theirs, in the backward that
/// `what` describes. Raises an Error if ranks differ: some would wait for sums that others do not join.
void compare_started(const std::vector<std::shared_ptr<Unit>>& units, size_t started, const std::string& what);

/// From now on trees_sharing_groups() finds `tree` for this unit.
void add_to_tree(const Unit& unit, const std::shared_ptr<Schedule>& tree);
/// The trees whose sums use the process groups of these units, their own tree included, in the order in which they were
/// made, which is the same on all ranks.
std::vector<std::shared_ptr<Schedule>> trees_sharing_groups(const std::vector<std::shared_ptr<Unit>>& units);

} // namespace shardwise::engine
