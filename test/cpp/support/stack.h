#pragma once

#include <sys/types.h>

#include <string>

namespace shardwise::test {

/// Makes stack_of() possible: takes SIGUSR2 for it.
void allow_stacks();

/// The calls that a thread of this process is in, the innermost first, one a line. One caller at a time.
std::string stack_of(pid_t thread);

} // namespace shardwise::test
