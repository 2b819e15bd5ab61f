#include "programs/machine.h"

#include "programs/require.h"

#include "group/leaf_storage.h"
#include "layout/shards.h"

#include <c10/util/StringUtil.h>

namespace shardwise::test {

using torch::Tensor;

Tensor Machine::piece_of(const std::string& name, const Tensor& whole) const {
  const int unit = program_.unit_of(name);
  if (unit < 0 || !program_.units[static_cast<size_t>(unit)].is_sharded) return whole;
  const auto& spec = program_.units[static_cast<size_t>(unit)];
  const int64_t parts = Program::kRanks / program_.copies;
  const int64_t part = rank_.rank() % parts;
  if (spec.is_flat) {
    std::vector<std::vector<int64_t>> shapes;
    size_t index = 0;
    for (size_t i = 0; i < spec.parameters.size(); ++i) {
      shapes.push_back(plain_parameters_[spec.parameters[i]].sizes().vec());
      if (spec.parameters[i] == name) index = i;
    }
    const auto cut = layout::flat(shapes, parts, 128 / static_cast<int64_t>(sizeof(double))).cuts[index];
    return whole.flatten().narrow(0, cut.starts[part], cut.length(part));
  }
  const auto dim = spec.is_last_dim ? whole.dim() - 1 : 0;
  const auto chunk = (whole.size(dim) + parts - 1) / parts;
  const auto start = std::min(part * chunk, whole.size(dim));
  return whole.narrow(dim, start, std::min(chunk, whole.size(dim) - start));
}

void Machine::check() const {
  const auto shards = ours_->named_parameters();
  require(shards.keys() == plain_parameters_.keys(), "the names of the parameters differ");
  for (const auto& entry : shards) {
    const auto text = entry.key() + " of " + rank_.name();
    const auto& plain = plain_parameters_[entry.key()];
    const auto& ours = entry.value();
    require_close(ours.detach(), piece_of(entry.key(), plain.detach()), text);
    const auto presence = c10::str("the gradient of ", text, ours.grad().defined() ? " is there" : " is missing");
    require(ours.grad().defined() == plain.grad().defined(), presence);
    if (plain.grad().defined()) {
      require_close(ours.grad(), piece_of(entry.key(), plain.grad()), "the gradient of " + text);
    }
  }
}

void Machine::check_freed(int top, bool all) const {
  for (size_t i = 0; i < units_.size(); ++i) {
    const auto& spec = program_.units[i];
    if (!spec.is_sharded || !program_.is_in(static_cast<int>(i), top)) continue;
    if (!all && !states_[i].frees_after_backward) continue;
    for (const auto& name : spec.parameters) require(group::is_freed(members_.at(name)), name + " is not freed");
  }
}

} // namespace shardwise::test
