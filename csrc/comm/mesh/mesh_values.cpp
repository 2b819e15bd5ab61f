// Mesh functions that combine values of all ranks.
#include "comm/collectives/collectives.h"
#include "comm/mesh/axis_group.h"

#include <shardwise/error.h>
#include <shardwise/mesh.h>
#include "base/on_host.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

namespace shardwise {
namespace {

/// Reduces along one axis after the other; then all ranks have the same result. On a device it is on its way there, and
/// what is returned tells whether it came, once the host has waited.
std::vector<comm::Pending> reduce(
    const Mesh& mesh, const at::Tensor& value, const char* name, c10d::ReduceOp::RedOpType op) {
  Counters none;
  std::vector<comm::Pending> reduced;
  for (const auto& line : comm::axis_groups_of(mesh)) {
    const comm::Collectives ranks(line);
    if (ranks.size() == 1) continue;
    reduced.push_back(ranks.all_reduce(value, c10::str(name, " of ", mesh.describe()), none, op));
    reduced.back().wait();
  }
  return reduced;
}

/// The value on the host. Raises PeerError if a collective failed.
at::Tensor read(const at::Tensor& value, std::vector<comm::Pending> reduced) {
  auto here = value.cpu();
  for (auto& each : reduced) each.wait();
  return here;
}

} // namespace

void Mesh::barrier() const {
  const auto nothing = at::zeros({1}, at::TensorOptions(device()));
  read(nothing, reduce(*this, nothing, "Mesh::barrier()", c10d::ReduceOp::SUM));
}

at::Tensor Mesh::mean(const at::Tensor& value) const {
  if (!value.defined() || !value.is_floating_point()) {
    throw ValueError(
        "shardwise: Mesh::mean() got a tensor that is undefined, or not of a floating-point type. Cast it with to().");
  }
  const c10::NoGradGuard no_grad;
  auto sum = value.detach().to(device(), value.scalar_type(), /*non_blocking=*/false, /*copy=*/true).contiguous();
  auto reduced = reduce(*this, sum, "Mesh::mean()", c10d::ReduceOp::SUM);
  sum.div_(static_cast<double>(size()));
  return value.is_cpu() ? read(sum, std::move(reduced)) : sum.to(value.device());
}

double Mesh::mean(double value) const {
  return mean(at::full({1}, value, base::on_host(at::kDouble))).item<double>();
}

bool Mesh::any(bool value) const {
  const auto flag = at::full({1}, value ? 1 : 0, at::TensorOptions(device()).dtype(at::kLong));
  return read(flag, reduce(*this, flag, "Mesh::any()", c10d::ReduceOp::MAX)).item<int64_t>() != 0;
}

} // namespace shardwise
