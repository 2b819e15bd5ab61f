#pragma once

#include "nn/state/module_state.h"

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>

#include <cstdint>
#include <functional>
#include <optional>
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
  /// Raises Error if ranks name different files or folders. `verb` is what they do with them.
  void agree_on_place(const std::string& place, const std::string& verb) const;

 private:
  int64_t rank_ = 0;
  int64_t size_ = 1;
  Exchange exchange_;
};

/// All ranks of a mesh. `function` is what is being called.
SHARDWISE_API Ranks ranks_on(const Mesh& mesh, const std::string& function);
/// The same, over process groups that nothing else uses, so that a thread may talk to the others' threads.
/// Raises Error if the groups are the caller's and have no store.
SHARDWISE_API Ranks ranks_on_save_groups(const Mesh& mesh);

/// The mesh whose ranks save or load a module together: that of its units, or `mesh` if the caller names one; nothing
/// for a module without units, which is this rank's own. `function` is what is being called.
/// Raises ValueError if its units lie on meshes of other ranks, whose parameters of one name need not be one tensor.
std::optional<Mesh> mesh_of(
    const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function);

/// These ranks.
Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function);

} // namespace shardwise::saves
