#include "comm/rendezvous/processes.h"

#include "base/host.h"

#include <c10/util/StringUtil.h>

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <sstream>
#include <thread>

namespace shardwise::comm {

class Processes::Process {
 public:
  explicit Process(const std::string& identity) {
    std::istringstream fields(identity);
    uint64_t start = 0;
    std::string host;
    fields >> rank >> number >> start >> std::ws;
    std::getline(fields, host);
    if (host != base::this_host() || number == getpid()) return;
    watched_ = base::watch_process(number);
    gone_ = watched_.get() < 0 ? errno == ESRCH : base::process_start_time(number) != start;
  }

  bool ended() const {
    return gone_ || base::process_ended(watched_);
  }

  int64_t rank = 0;
  int64_t number = 0;

 private:
  base::Descriptor watched_;
  bool gone_ = false;
};

std::string Processes::identity(int64_t rank) {
  return c10::str(rank, " ", getpid(), " ", base::process_start_time(getpid()), " ", base::this_host());
}

Processes::Processes(const std::vector<std::string>& identities) {
  for (const auto& identity : identities) all_.push_back(std::make_shared<Process>(identity));
}

std::vector<size_t> Processes::ended() const {
  std::vector<size_t> positions;
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i]->ended()) positions.push_back(i);
  }
  return positions;
}

std::string Processes::how_it_ended(size_t position) const {
  const auto& process = *all_[position];
  return c10::str(
      "rank ", process.rank, " died: its process ", process.number, " on this host ended. Look for the error of rank ",
      process.rank, "; if there is none, it left the program earlier than the others");
}

// A dying process closes its connections a moment before it is gone.
std::string Processes::who_ended() const {
  constexpr std::chrono::milliseconds kMoment{10};
  constexpr int kMoments = 50;
  for (int i = 0; i < kMoments; ++i) {
    const auto positions = ended();
    if (!positions.empty()) return how_it_ended(positions.front());
    std::this_thread::sleep_for(kMoment);
  }
  return "";
}

} // namespace shardwise::comm
