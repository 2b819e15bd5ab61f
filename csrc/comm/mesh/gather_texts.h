#pragma once

#include "comm/collectives/collectives.h"

#include <string>
#include <vector>

namespace shardwise::comm {

/// Gathers one vector from each rank of a mesh with these axes: row r is rank r's, on the CPU. All ranks call it with
/// vectors of the same size. `device` is the mesh's.
at::Tensor gather_rows(
    const at::Tensor& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters);

/// Gathers one text from each rank, indexed by rank. Lengths may differ. All ranks call it.
std::vector<std::string> gather_texts(
    const std::string& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters);

} // namespace shardwise::comm
