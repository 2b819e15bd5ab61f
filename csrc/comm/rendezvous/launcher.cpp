#include "comm/rendezvous/launcher.h"

#include "base/fingerprint.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <limits>

namespace shardwise::comm {
namespace {

constexpr int kMostRanks = std::numeric_limits<int>::max();

/// The variables of a launcher. An empty name: it has none.
struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  /// The number of ranks on this host, or that of hosts.
  const char* local_size;
  const char* hosts;
  const char* host_list;
  const char* job;
};

// In this order: Slurm's are also there where another launcher is started by srun, once on each host.
constexpr std::array kLaunchers = {
    Names{
        "mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "", "", "PMIX_NAMESPACE"},
    Names{"mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "", ""},
    Names{
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_NODELIST", "SLURM_JOB_ID"},
};

std::optional<Launched> read_launcher(const Names& names, const Variable& variable) {
  Launched found;
  found.launcher = names.launcher;
  const auto text = [&](const char* name) -> std::string {
    if (*name == '\0') return "";
    auto value = variable(name).value_or("");
    if (!value.empty()) found.seen += c10::str(found.seen.empty() ? "" : ", ", name, "=", value);
    return value;
  };
  const auto number = [&](const char* name, int lowest) {
    const auto value = text(name);
    return value.empty() ? std::nullopt : std::optional(number_in(name, value, lowest, kMostRanks));
  };
  const auto rank = number(names.rank, 0);
  const auto size = number(names.size, 1);
  if (!rank || !size) return {};
  if (*rank >= *size) {
    throw ValueError(c10::str(
        "shardwise: the environment variable ", names.rank, " is ", *rank, ", but ", names.size, " is ", *size, "."));
  }
  found.rank = *rank;
  found.world_size = *size;
  found.local_rank = number(names.local_rank, 0);
  const bool on_one_host = number(names.local_size, 1) == size || number(names.hosts, 1) == 1;
  found.first_host = on_one_host ? "127.0.0.1" : first_host_of(text(names.host_list));
  found.job = text(names.job);
  return found;
}

} // namespace

int number_in(const std::string& name, const std::string& text, int lowest, int highest) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < lowest || value > highest) {
    throw ValueError(c10::str(
        "shardwise: the environment variable ", name, " is '", text, "'; it must be a whole number from ", lowest,
        " to ", highest, "."));
  }
  return value;
}

std::optional<Launched> find_launcher(const Variable& variable) {
  std::optional<Launched> chosen;
  for (const auto& names : kLaunchers) {
    auto found = read_launcher(names, variable);
    if (!found) continue;
    // srun also sets what MPICH's programs read, but says more in words of its own.
    const bool says_more =
        chosen && found->rank == chosen->rank && found->world_size == chosen->world_size && !chosen->local_rank;
    if (!chosen || says_more) chosen = std::move(found);
  }
  return chosen;
}

std::string first_host_of(const std::string& list) {
  std::string host;
  for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const auto close = list.find(']', at);
    if (close == std::string::npos) return "";
    const auto end = list.find_first_of("-,]", at + 1);
    host += list.substr(at + 1, end - at - 1);
    at = close;
  }
  return host;
}

int port_of(const std::string& job) {
  constexpr int kFirst = 20000;
  constexpr uint64_t kPorts = 10000;
  return kFirst + static_cast<int>(base::fingerprint(job) % kPorts);
}

} // namespace shardwise::comm
