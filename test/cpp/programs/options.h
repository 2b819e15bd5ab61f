#pragma once

#include <cstdint>
#include <optional>

namespace shardwise::test {

/// The program that --seed names: it alone is to run.
std::optional<uint64_t> chosen_seed();

} // namespace shardwise::test
