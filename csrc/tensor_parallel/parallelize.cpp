#include <shardwise/parallelize.h>

#include "base/compute_guard.h"
#include "base/reason.h"
#include "base/tensor_hooks.h"
#include "comm/mesh/gather_texts.h"
#include "nn/touch/touch.h"
#include "nn/wrap/aliases.h"
#include "observe/record.h"
#include "split/exchange.h"
#include "tensor_parallel/layers.h"
#include "tensor_parallel/plan.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise {

using split::Exchange;
using tensor_parallel::Chosen;

struct TensorParallel::State {
  std::shared_ptr<const split::SplitAxis> axis;
  std::string table;
};

const Counters& TensorParallel::counters() const {
  return state_->axis->counters;
}

std::string TensorParallel::table() const {
  return state_->table;
}

namespace tensor_parallel {
namespace {

void check(std::vector<Chosen>& chosen, bool allow_aliases) {
  std::vector<engine::NamedTensor> divided;
  for (const auto& one : chosen) {
    const auto& tensor = one.parameter.tensor;
    const auto refuse = [&](const std::string& why) {
      throw ValueError(c10::str("shardwise: parallelize(): '", one.parameter.names.front(), "' ", why));
    };
    if (split::split_parameter_of(tensor)) refuse("is divided already. Name each parameter in one call only.");
    if (engine::Unit::of(tensor)) {
      refuse("is in a unit already. Call parallelize() before fully_shard() and replicate().");
    }
    if (!tensor.is_floating_point() && !tensor.is_complex()) refuse("is not a floating-point tensor.");
    if (one.dim < 0) continue;
    if (tensor.grad().defined()) refuse("has a gradient. Call zero_grad() first, or parallelize() before training.");
    divided.push_back(one.parameter);
  }
  if (allow_aliases) return;
  nn::find_aliases(divided);
  for (const auto& parameter : divided) {
    if (!parameter.shared) continue;
    throw ValueError(c10::str(
        "shardwise: parallelize(): another tensor uses the memory of '", parameter.names.front(),
        "', and would keep its present values: a view or alias that the program holds. Make it afterwards, or allow it "
        "with ParallelizeOptions().allow_aliases(true)."));
  }
}

std::string line_of(const Chosen& one, int64_t rank) {
  const auto sizes = one.parameter.tensor.sizes();
  if (one.dim < 0) return c10::str(one.parameter.names.front(), ": ", sizes, ", whole, its gradient summed");
  auto piece = sizes.vec();
  piece[static_cast<size_t>(one.dim)] = one.pieces.length(rank);
  return c10::str(one.parameter.names.front(), ": ", sizes, ", here ", at::IntArrayRef(piece));
}

std::string table_of(const std::vector<Chosen>& chosen, int64_t rank) {
  std::string text;
  for (const auto& one : chosen) text += line_of(one, rank) + "\n";
  return text;
}

/// Raises what is wrong on any rank, on all.
void agree(const std::string& error, const std::vector<Chosen>& chosen, const split::SplitAxis& axis) {
  const auto texts = comm::gather_texts(
      (error.empty() ? " " : "!") + (error.empty() ? table_of(chosen, 0) : error), {axis.ranks}, axis.mesh.device(),
      "the exchange of parallelize()", axis.counters);
  for (const auto& text : texts) {
    if (text.front() == '!') throw ValueError(text.substr(1));
  }
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    throw ValueError(c10::str(
        "shardwise: parallelize(): the ranks along axis '", axis.name, "' divide different parameters. Rank 0 has\n",
        texts[0], "\nand rank ", rank, "\n", texts[rank], "\nGive all ranks the same model and the same plan."));
  }
}

/// All tensors of the module come to the mesh's device, and get the values of the first rank.
void share(const torch::nn::Module& module, const split::SplitAxis& axis, bool broadcast) {
  const auto all = nn::walk(module);
  const auto device = axis.mesh.device();
  for (const auto* kind : {&all.parameters, &all.buffers}) {
    for (const auto& named : *kind) {
      const auto& tensor = named.tensor;
      if (tensor.is_meta() || engine::Unit::of(tensor) || split::split_parameter_of(tensor)) continue;
      const base::ComputeGuard guard;
      if (tensor.device() != device) tensor.set_data(tensor.to(device));
      if (!broadcast || axis.ranks.size() == 1 || tensor.numel() == 0) continue;
      // A copy: a process group may hold what it sent a little longer, and aliases of parameters are looked for.
      const auto values = tensor.clone(at::MemoryFormat::Contiguous);
      const auto what = c10::str("the broadcast of '", named.names.front(), "' by parallelize()");
      axis.ranks.broadcast(values.view({-1}).view(at::kByte), 0, what, axis.counters).wait();
      tensor.copy_(values);
    }
  }
}

void cut(const Chosen& one, const std::shared_ptr<const split::SplitAxis>& axis) {
  const auto& tensor = one.parameter.tensor;
  const auto parameter = std::make_shared<split::SplitParameter>(split::SplitParameter{
      one.parameter.names.front(), tensor.sizes().vec(), one.dim, one.pieces, axis, one.matrix, one.table});
  {
    const base::ComputeGuard guard;
    tensor.set_data(
        split::piece_of(tensor.detach(), one.dim, one.pieces, axis->rank()).clone(at::MemoryFormat::Contiguous));
  }
  split::add_split(tensor, parameter);
  nn::add_touch_key(tensor);
}

void sum_gradient(const Chosen& one, const std::shared_ptr<const split::SplitAxis>& axis) {
  const auto& tensor = one.parameter.tensor;
  const Exchange exchange(std::make_shared<split::SplitParameter>(
      split::SplitParameter{one.parameter.names.front(), tensor.sizes().vec(), one.dim, one.pieces, axis, {}, {}}));
  base::add_hook(tensor, [exchange](const at::TensorBase& gradient) -> at::TensorBase {
    if (!gradient.defined() || exchange.parameter().axis->ranks.size() == 1) return {};
    const base::ComputeGuard guard;
    return exchange.sum(at::Tensor(gradient).clone(at::MemoryFormat::Contiguous), "the sum of the gradient");
  });
}

} // namespace
} // namespace tensor_parallel

TensorParallel parallelize(
    torch::nn::Module& module, const Mesh& mesh, const std::string& axis, const SplitPlan& plan,
    const ParallelizeOptions& options) {
  using namespace tensor_parallel;
  observe::open_program_record(mesh.rank());
  const auto on = std::make_shared<split::SplitAxis>(
      split::SplitAxis{mesh, axis, comm::Collectives(comm::axis_group_of(mesh, axis)), {}});
  std::vector<Chosen> chosen;
  std::string error;
  try {
    chosen = choose(module, plan, on->ranks.size());
    check(chosen, options.allow_aliases());
  } catch (const std::exception& failed) {
    error = base::text_of(failed);
  }
  agree(error, chosen, *on);
  const auto table = table_of(chosen, on->rank());
  share(module, *on, options.broadcast());
  watch_pieces();
  for (const auto& one : chosen) {
    if (one.dim >= 0) cut(one, on);
    if (one.sums_gradient) sum_gradient(one, on);
  }
  on->counters = {};
  return TensorParallel(std::make_shared<TensorParallel::State>(TensorParallel::State{on, table}));
}

} // namespace shardwise
