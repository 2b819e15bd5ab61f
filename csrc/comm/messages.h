#pragma once

#include "comm/collectives.h"

#include <string>
#include <vector>

namespace shardwise::comm {

/// The vectors of all ranks of a mesh with these axes as rows, on the CPU. All ranks call it with vectors of one size.
/// `device` is the mesh's.
at::Tensor gather_rows(
    const at::Tensor& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters);

/// The texts of all ranks, by rank; they may differ in length. All ranks call it.
std::vector<std::string> gather_texts(
    const std::string& mine, const std::vector<Collectives>& axes, at::Device device, const std::string& what,
    Counters& counters);

} // namespace shardwise::comm
