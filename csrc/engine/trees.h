#pragma once

#include <memory>
#include <vector>

namespace shardwise::engine {

class Schedule;
class Unit;

/// Has all ranks compare which of these units, a tree, sum their gradients in the backward that begins. Raises an Error
/// that names them when ranks differ: the sums that follow are then the same everywhere.
void agree_on_sums(const std::vector<std::shared_ptr<Unit>>& units);

/// Has all ranks compare how many of these units have started their sums, in the order of sums, in a backward that
/// died. Raises an Error where ranks differ: some of them wait for sums that others will not join.
void agree_on_death(const std::vector<std::shared_ptr<Unit>>& units, size_t started);

/// A tree has this unit.
void add_to_tree(const Unit& unit, const std::shared_ptr<Schedule>& tree);
/// The trees whose sums go over the process groups of these units, this one's too, in the order in which they were
/// made: that is the same on all ranks.
std::vector<std::shared_ptr<Schedule>> trees_beside(const std::vector<std::shared_ptr<Unit>>& units);

} // namespace shardwise::engine
