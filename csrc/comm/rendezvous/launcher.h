#pragma once

#include <shardwise/detail/export.h>

#include <functional>
#include <optional>
#include <string>

namespace shardwise::comm {

/// What a launcher other than torchrun tells a process with variables of its own.
struct Launched {
  /// As errors name it.
  std::string launcher;
  int rank = 0;
  int world_size = 1;
  /// Among the ranks of this host.
  std::optional<int> local_rank;
  /// The host that has rank 0; empty if the launcher does not say.
  std::string first_host;
  /// What no other job of the launcher has; empty if the launcher does not say.
  std::string job;
  /// The variables that it was read from, with their values, for errors.
  std::string seen;
};

/// Reads variables of the environment.
using Variable = std::function<std::optional<std::string>(const std::string& name)>;

/// Open MPI's mpirun, that of MPICH and Intel MPI, and Slurm's srun; nothing if none of them started this process.
/// Raises ValueError for a value that is no number, and for a rank that its number of ranks does not have.
SHARDWISE_API std::optional<Launched> find_launcher(const Variable& variable);

/// The first host of a list in Slurm's form: node03 of node[03-05,7],other. Empty if it is no such list.
SHARDWISE_API std::string first_host_of(const std::string& list);

/// A port that the ranks of a job agree on: another one for most other jobs, and none that the system gives out.
SHARDWISE_API int port_of(const std::string& job);

/// A whole number that a variable has. Raises ValueError, with its name, for another text.
SHARDWISE_API int number_in(const std::string& name, const std::string& text, int lowest, int highest);

} // namespace shardwise::comm
