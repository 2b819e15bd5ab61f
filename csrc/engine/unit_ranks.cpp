#include "engine/unit_ranks.h"

#include "comm/mesh/axis_group.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise::engine {

using comm::Agreement;

UnitRanks::UnitRanks(const Mesh& mesh, bool replicates, bool custom_on_mesh)
    : mesh_(mesh),
      replicates_(replicates),
      custom_on_mesh_(custom_on_mesh) {
  const auto groups = comm::axis_groups_of(mesh);
  agreement_ = Agreement::of(groups);
  is_alone_ = !agreement_ && Agreement::is_alone(groups);
  const auto first = groups.size() == 2 ? Agreement::first_axis : Agreement::group;
  if (replicates || groups.size() == 2) copies_ = comm::Collectives(groups.front()).at({agreement_, first});
  if (!replicates) shards_ = comm::Collectives(groups.back()).at({agreement_, Agreement::group});
}

void UnitRanks::make_groups() {
  known_ = shards_;
  if (!agreement_) {
    gather_ = shards_;
    return;
  }
  const auto& axes = mesh_.axes();
  const auto on_own_group = [&](comm::Collectives& collectives, const std::string& axis, Agreement::Chain chain) {
    if (collectives.size() == 1) return true;
    const auto group = comm::MeshGroups::sum(mesh_, axis);
    const bool is_own = group != mesh_.group(axis);
    if (is_own) collectives = comm::Collectives({group, collectives.names()}).at({agreement_, chain});
    return is_own;
  };
  const auto first = axes.size() == 2 ? Agreement::first_axis : Agreement::group;
  const bool copies_apart = on_own_group(copies_, axes.front().name, first);
  sums_have_groups_ = on_own_group(shards_, axes.back().name, Agreement::group) && copies_apart;
  if (replicates_) return;
  const auto group = comm::MeshGroups::gather(mesh_, axes.back().name);
  gather_ = comm::Collectives({group, shards_.names()});
  gathers_have_group_ = group != mesh_.group(axes.back().name);
}

void UnitRanks::make_neighbours(int64_t count, const c10::intrusive_ptr<c10d::ProcessGroup>& given) {
  const auto names = shards_.names();
  const auto first = shards_.rank() / count * count;
  const auto group =
      given && !agreement_ ? given : comm::MeshGroups::neighbours(mesh_, mesh_.axes().back().name, count);
  neighbours_ = comm::Collectives({group, {.first = names[first], .stride = names.stride}});
}

// With a single shard every rank has everything. Full copies may then come and go on some ranks only, so nothing is
// compared.
comm::Collectives UnitRanks::for_gather(
    const Gather& gather, const CustomCollectives& custom_collectives, const std::function<std::string()>& describe,
    Counters& counters) {
  const auto& ranks = gather.near ? neighbours_ : gathers_on_own_group(custom_collectives) ? gather_ : known_;
  if (shards_.size() == 1) return ranks;
  const auto as_wanted = [&](const comm::Collectives& collectives) {
    return custom_collectives.in_own_memory ? collectives.in_own_memory()
                                            : collectives.by(custom_collectives.all_gather);
  };
  if (!agreement_) return as_wanted(ranks);
  const bool apart = gathers_on_own_group(custom_collectives) || sums_on_own_groups(custom_collectives);
  const auto event = 4 * gather.unit + (gather.near ? 2 : 0) + (gather.backward ? 1 : 0);
  const auto chain = apart ? Agreement::second_group : Agreement::group;
  return as_wanted(ranks.at(agreement_->enter(chain, event, describe, counters)));
}

comm::Collectives UnitRanks::in_order(const comm::Collectives& collectives, Agreement::Chain chain) const {
  return agreement_ && collectives.size() > 1 ? collectives.at(agreement_->pass(chain)) : collectives;
}

comm::Collectives UnitRanks::for_first_sum(const CustomCollectives& custom_collectives) const {
  const auto& ranks = sums_on_own_groups(custom_collectives) ? shards_ : known_;
  return ranks.size() > 1 ? in_order(ranks, Agreement::group).by(custom_collectives.reduce_scatter) : ranks;
}

comm::Collectives UnitRanks::for_second_sum() const {
  return in_order(copies_, shards_.size() > 1 ? Agreement::first_axis : Agreement::group);
}

const comm::Collectives* UnitRanks::memory_of_sums(const CustomCollectives& custom_collectives) const {
  if (!custom_collectives.in_own_memory || world() == 1) return nullptr;
  if (shards_.size() == 1) return &copies_;
  return sums_on_own_groups(custom_collectives) ? &shards_ : &known_;
}

void UnitRanks::require_memory(at::Device device) const {
  const auto require = [&](const comm::Collectives& ranks, const char* of) {
    if (ranks.size() == 1 || ranks.has_memory(device)) return;
    throw Error(c10::str(
        "shardwise: the process group for the ", of, " on ", device,
        " offers no memory of its own. NCCL does, on GPUs that can share memory by multicast; other back ends may. "
        "Remove the call: collectives then use ordinary memory."));
  };
  if (!replicates_) require(gathers_have_group_ ? gather_ : known_, "gathers");
  require(shards_.size() > 1 ? shards_ : copies_, "sums of gradients");
}

bool UnitRanks::sums_share_group(const CustomCollectives& custom_collectives) const {
  return world() > 1 && !is_alone_ && (!agreement_ || !sums_on_own_groups(custom_collectives));
}

comm::Collectives UnitRanks::for_event(int64_t event, const char* what, Counters& counters) {
  if (!agreement_) return shards_;
  return shards_.at(agreement_->enter(
      Agreement::group, event, [what] { return what; }, counters));
}

std::vector<comm::Collectives> UnitRanks::all_for_event(int64_t event, const char* what, Counters& counters) {
  if (!agreement_) return axes();
  const auto position = agreement_->enter(
      Agreement::group, event, [what] { return what; }, counters);
  if (shards_.size() == 1) return {copies_.at(position)};
  return {shards_.at(position), for_second_sum()};
}

void UnitRanks::compare_now(int64_t event, const std::string& text, Counters& counters) {
  if (agreement_) agreement_->compare_now(event, text, counters);
}

// The first axis brings the values to one rank of each row, the second axis to the whole row.
void UnitRanks::broadcast_from_first(const at::Tensor& tensor, const std::string& what, Counters& counters) const {
  for (const auto& axis : axes()) {
    if (axis.size() > 1) axis.broadcast(tensor, 0, what, counters).wait();
  }
}

} // namespace shardwise::engine
