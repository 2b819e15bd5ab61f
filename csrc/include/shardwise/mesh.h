#pragma once

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise {

namespace comm {
struct MeshGroups;
}

/// One named direction of a mesh, and its number of ranks.
struct Axis {
  /// Not empty, and different from the names of the mesh's other axes.
  std::string name;
  /// At least 1.
  int64_t size;
  /// Whether both have the same name and size.
  bool operator==(const Axis&) const = default;
};

/// How tensors on the CPU travel. `direct`: shardwise's own transport, which uses shared memory on one host and TCP
/// between hosts, sums in the order of the ranks, and names the rank at fault. `gloo`: torch's back end.
enum class Transport : uint8_t { direct, gloo };

/// How a mesh finds its peers. Without a store, rank and world size come from the environment.
struct SHARDWISE_API MeshOptions {
  /// The device of this rank. Unset: the CPU if there is no GPU, the only GPU, or cuda:LOCAL_RANK. A device without an
  /// index gets one in the same way. Several ranks with several visible GPUs and no LOCAL_RANK are a ValueError.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// How long to wait for the other ranks and for the store to answer while the mesh is set up.
  TORCH_ARG(std::chrono::milliseconds, connect_timeout) = std::chrono::minutes(5);
  /// How long a collective may take.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::minutes(10);
  /// Unset: the environment variable SHARDWISE_TRANSPORT decides, `direct` or `gloo`; else direct carries tensors on
  /// the CPU, and NCCL those on GPUs. If set, direct carries a GPU's tensors too, through the host's memory: slower
  /// than NCCL, but several ranks may share a GPU.
  TORCH_ARG(std::optional<Transport>, transport) = std::nullopt;
  /// Whether the direct transport uses shared memory if all ranks of a process group are on one host. If one rank does
  /// not want it, none uses it. Unset: the environment variable SHARDWISE_SHARED_MEMORY decides, `on` or `off`; else
  /// on.
  TORCH_ARG(std::optional<bool>, shared_memory) = std::nullopt;
  /// A store that all ranks share; rank and world_size are then needed too, and the environment is not read. All ranks
  /// must make their meshes over one store in the same order.
  TORCH_ARG(c10::intrusive_ptr<c10d::Store>, store) = {};
  /// The number of this rank, from 0. Only with a store.
  TORCH_ARG(int, rank) = -1;
  /// The number of ranks. Only with a store.
  TORCH_ARG(int, world_size) = -1;
};

/// The ranks of a job, laid out along named axes, with a process group for each axis: NCCL for CUDA devices, a
/// Transport for CPUs. The last axis varies fastest with the rank. Copies share the same groups; the last copy to go
/// closes them.
///
/// From the environment: torchrun's variables (the agent's store and restarts too), or plain RANK, WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT, or nothing at all: a world of one. There is one mesh from the environment at a time.
///
/// Ignores SIGPIPE unless the program has its own handler: a C++ program would otherwise die without a word when a peer
/// does. Thread safe after construction. Raises ValueError for bad input, PeerError for peers that do not come.
class SHARDWISE_API Mesh {
 public:
  /// One axis, "world", over all ranks of the environment.
  static Mesh from_env(const MeshOptions& options = {});

  /// The mesh from the environment that is open now, whatever its axes; from_env(options) if there is none.
  static Mesh current(const MeshOptions& options = {});

  /// The given axes over all ranks of the environment or of options.store. Their sizes multiply to the world size.
  explicit Mesh(std::vector<Axis> axes, const MeshOptions& options = {});

  /// A mesh over process groups that exist already, one for each axis, the slowest axis first. The caller shuts them
  /// down. A device without an index gets one as in MeshOptions.
  static Mesh from_process_groups(
      const std::vector<std::string>& names, const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
      at::Device device);

  /// A mesh of some of these axes, over the same process groups: of the ranks that differ from this one along them
  /// only. For fully_shard() or replicate() beside parallelize(). This mesh stays open as long as the result.
  Mesh along(const std::vector<std::string>& axes) const;

  /// Whether both are copies of one mesh.
  bool is_same(const Mesh& other) const {
    return state_ == other.state_;
  }
  /// The axes, the slowest first.
  const std::vector<Axis>& axes() const;
  /// The number of axes.
  int64_t ndim() const;
  /// The number of ranks in the mesh.
  int64_t size() const;
  /// The number of ranks along one axis. Raises ValueError if there is no such axis.
  int64_t size(const std::string& axis) const;
  /// This rank's number in the mesh.
  int64_t rank() const;
  /// This rank's position along one axis. Raises ValueError if there is no such axis.
  int64_t coordinate(const std::string& axis) const;
  /// The device on which this rank's modules compute.
  at::Device device() const;
  /// The process group of the ranks that differ from this one only along that axis. Raises after shutdown().
  const c10::intrusive_ptr<c10d::ProcessGroup>& group(const std::string& axis) const;

  // For a program's own questions to all ranks. All ranks must make the same calls, in the same order as anything else
  // on group(). After MeshOptions().timeout() a PeerError names a rank that does not come.

  /// Returns when all ranks have called it.
  void barrier() const;
  /// The mean of the ranks' values, the same on all of them: for metrics. All values must have the same shape and the
  /// same floating-point dtype. The argument stays as it is, and the result has no gradient.
  at::Tensor mean(const at::Tensor& value) const;
  /// The same for one number.
  double mean(double value) const;
  /// Whether any rank says yes.
  bool any(bool value) const;

  /// Closes the process groups that this mesh made. Safe to call twice; the destructor of the last copy calls it.
  void shutdown();

  /// For example: Mesh(replicate=2, shard=4; rank 3 on cpu, shared memory). The last part says how the direct transport
  /// travels: by shared memory or TCP.
  std::string describe() const;

 private:
  friend struct comm::MeshGroups;
  struct State;
  explicit Mesh(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

} // namespace shardwise
