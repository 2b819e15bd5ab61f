#pragma once

namespace shardwise::files {

/// Before the names of what an optimizer keeps, and of the program's own tensors; what has neither is the module's.
constexpr const char* kOptimizer = "optimizer.";
constexpr const char* kProgram = "program.";
/// What the names of an optimizer's tensors begin with.
constexpr const char* kOptimizerState = "optimizer.state.";
constexpr const char* kOptimizerOptions = "optimizer.param_groups.";

} // namespace shardwise::files
