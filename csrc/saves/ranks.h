#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardwise::saves {

/// The ranks that save or load a checkpoint together. All of them call the same functions in the same order.
class SHARDWISE_API Ranks {
 public:
  /// Gathers a text of each rank, indexed by rank.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

  /// A rank that is alone.
  Ranks() = default;
  Ranks(int64_t rank, int64_t size, Exchange exchange) : rank_(rank), size_(size), exchange_(std::move(exchange)) {}

  int64_t rank() const {
    return rank_;
  }
  int64_t size() const {
    return size_;
  }
  bool is_first() const {
    return rank_ == 0;
  }

  /// Runs what may fail on any rank, and returns the text that each rank's call returned. If it raises on some ranks,
  /// it raises on all: there what it raised, elsewhere an Error that names the first of these ranks.
  std::vector<std::string> together(const std::function<std::string()>& act) const;
  /// Raises Error where ranks name different files or folders. `verb` is what they do with them.
  void agree_on_place(const std::string& place, const std::string& verb) const;

 private:
  int64_t rank_ = 0;
  int64_t size_ = 1;
  Exchange exchange_;
};

} // namespace shardwise::saves
