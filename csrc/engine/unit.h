#pragma once

#include "comm/collectives.h"
#include "group/group.h"
#include "group/parameter.h"

#include <shardwise/export.h>
#include <shardwise/mesh.h>
#include <shardwise/unit.h>

#include <memory>
#include <string>
#include <vector>

namespace shardwise::engine {

/// A tensor of a module and all the names it has there.
struct NamedTensor {
  std::vector<std::string> names;
  at::Tensor tensor;
};

/// One replicate() call: the parameters below a module that no inner unit has, and the order of their averaging.
///
/// Units form a tree: a unit takes over the trees of the units whose parameters lie below it. A backward that brings
/// a gradient anywhere in a tree averages all its groups, once, at the end of the backward, in the order in which the
/// units were made. Which ranks used which parameter has no say in it, so ranks agree on the order.
///
/// The hooks of its parameters keep a unit alive, a unit keeps its outer one; nothing here keeps a parameter alive.
/// Belongs to the thread that trains; autograd's device threads may call in one at a time.
class SHARDWISE_API Unit : public std::enable_shared_from_this<Unit>, private group::Parameter::Listener {
 public:
  /// Every tensor once. Compares the names, shapes and dtypes of all ranks; with `broadcast` every rank then gets the
  /// values of rank 0 of the parameters that this unit has itself and of the buffers.
  static std::shared_ptr<Unit> create(
      Mesh mesh, std::vector<NamedTensor> parameters, const std::vector<NamedTensor>& buffers, bool broadcast);

  /// The unit that has this parameter; null when none has.
  static std::shared_ptr<Unit> of(const at::Tensor& parameter);

  const std::string& name() const {
    return name_;
  }
  std::shared_ptr<Unit> top();
  bool has(const at::Tensor& parameter) const;

  void set_sync(bool value, bool recurse);
  bool sync() const {
    return sync_;
  }

  /// At the end of a backward that brought gradients to this tree; this is its top.
  void average();
  /// At the end of a backward that failed, or that brought none.
  void forget_backward();

  Plan plan() const;
  Counters counters() const;
  /// Units that were made earlier have lower numbers.
  int64_t number() const {
    return number_;
  }

 private:
  explicit Unit(Mesh mesh);
  void gradient_arriving() override;
  void gradient_arrived() override;

  void adopt(const std::vector<NamedTensor>& adopted);
  void check_structure(const std::vector<NamedTensor>& own, size_t adopted);
  void broadcast(const std::vector<NamedTensor>& tensors);
  /// This unit and all below it, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> tree() const;
  void begin_average();
  void finish_average();
  /// Makes the groups anew when parameters were cast, moved, frozen or unfrozen since.
  void renew_groups();

  int64_t number_;
  std::string name_;
  Mesh mesh_;
  comm::Collectives collectives_;
  std::vector<std::unique_ptr<group::Parameter>> parameters_;
  /// The parameters that are trained, in groups.
  std::vector<group::Parameter*> trained_;
  std::vector<group::Group> groups_;
  std::shared_ptr<Unit> outer_;
  std::vector<std::weak_ptr<Unit>> inner_;
  bool sync_ = true;
  Counters counters_;
};

} // namespace shardwise::engine
