#pragma once

namespace shardwise::saves {

/// Before the names of what an optimizer keeps, and of the program's own tensors; what has neither is the module's.
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kProgram = "program.";

} // namespace shardwise::saves
