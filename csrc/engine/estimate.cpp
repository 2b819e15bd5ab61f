#include "engine/estimate.h"

#include "comm/rendezvous/environment.h"
#include "engine/step_memory.h"
#include "engine/step_time.h"
#include "group/gradients.h"
#include "group/outline.h"
#include "group/unpacking.h"
#include "layout/shards.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace shardwise::engine {
namespace {

using Parameter = MemoryOutline::Parameter;

int64_t bytes_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t count(const Parameter& parameter) {
  return c10::multiply_integers(parameter.sizes);
}

class Estimate {
 public:
  Estimate(const MemoryOutline& outline, const MemoryPolicy& policy)
      : outline_(outline),
        policy_(policy),
        gradients_(outline.parameters.size()),
        groups_(outline.parameters.size()),
        owners_(outline.parameters.size()) {
    for (size_t unit = 0; unit < outline.units.size(); ++unit) add_unit(unit);
    for (const auto& event : outline.forward) add_event(event);
    result_.buffers = outline.buffer_bytes;
    result_.optimizer = static_cast<int64_t>(static_cast<double>(trained_) * policy.optimizer_factor);
  }

  TimeEstimate time(const Links& links, double compute) const {
    const StepRanks ranks{policy_.shards, policy_.copies, links};
    const auto time = time_steps(units_, events_, ranks, compute, static_cast<size_t>(policy_.sums_in_flight));
    return {.compute = compute, .wire = time.wire, .step = time.step};
  }

  MemoryEstimate result() {
    // On a CPU idle memory is the arena's.
    const bool keeps_idle = policy_.sums_in_stream;
    const auto peaks = walk_steps(units_, events_, static_cast<size_t>(policy_.sums_in_flight), keeps_idle);
    result_.pool = peaks.pool;
    result_.unsummed_gradients = peaks.unsummed_gradients;
    result_.gradients = sums_ + means_;
    const auto always = result_.parameters + result_.buffers + result_.optimizer + sums_;
    const auto kept = policy_.keeps_means ? means_ : 0;
    result_.forward_peak = always - sums_ + kept + peaks.forward;
    result_.after_step = always + means_ + peaks.pool;
    result_.backward_peak = std::max(always - sums_ + kept + peaks.backward, result_.after_step);
    return result_;
  }

 private:
  /// A parameter's number in the outline, and its description within this unit.
  struct Item {
    size_t number;
    Parameter parameter;
  };

  /// Any device will do: in the end all parameters are on that of the mesh.
  static group::Kind kind_of(const Item& item) {
    const auto& parameter = item.parameter;
    return {parameter.dtype, at::kCPU, parameter.whole, /*extended=*/false, parameter.full_dtype};
  }

  bool is_alone() const {
    return policy_.shards * policy_.copies == 1;
  }

  void add_unit(size_t number) {
    const auto& unit = outline_.units[number];
    std::vector<Item> items;
    for (const auto parameter : unit.parameters) {
      owners_[parameter] = number;
      items.push_back({parameter, outline_.parameters[parameter]});
      items.back().parameter.whole |= !unit.has_full_copies;
    }
    UnitBytes row;
    row.outer = unit.outer;
    const auto& reshard = policy_.reshard;
    row.reshards_after_forward =
        reshard ? reshard->frees() && reshard->ranks() != 1 : !policy_.replicates && row.outer.has_value();
    for (const auto& group : group::by_kind(items, kind_of)) {
      for (const auto& item : group) groups_[item.number] = row.groups.size();
      row.groups.push_back(add_group(group));
    }
    row.has_full_copies = unit.has_full_copies && !items.empty();
    row.is_gathered = row.has_full_copies && policy_.shards > 1;
    row.is_summed = !is_alone();
    row.keeps_full = policy_.keeps_full;
    row.sums_in_stream = policy_.sums_in_stream;
    units_.push_back(std::move(row));
  }

  static layout::Shards lay_out(const std::vector<Item>& items, const group::Outline& outline) {
    std::vector<std::vector<int64_t>> shapes;
    std::vector<int64_t> dims;
    for (const auto& item : items) {
      shapes.push_back(item.parameter.sizes);
      dims.push_back(item.parameter.dim);
    }
    return outline.lay_out(shapes, dims);
  }

  /// The elements that a gather puts in place directly: on CPUs, over our own transport.
  int64_t placed(const layout::Shards& layout, at::ScalarType dtype) const {
    if (policy_.sums_in_stream || layout.world == 1) return 0;
    int64_t elements = 0;
    for (const auto& cut : layout.cuts) {
      for (int64_t rank = 0; rank < layout.world; ++rank) {
        if (group::Unpacking::can_place(cut, rank, dtype)) elements += cut.piece_numel(rank);
      }
    }
    return elements;
  }

  GroupBytes add_group(const std::vector<Item>& items) {
    const auto whole = items.front().parameter.whole;
    const group::Outline outline(
        kind_of(items.front()), {policy_.is_flat ? group::Layout::flat : group::Layout::rows, policy_.shards,
                                 policy_.precision.param_dtype(), policy_.precision.reduce_dtype()});
    const auto own = outline.dtype;
    const auto compute = outline.full_dtype;
    const auto sum = outline.sum_dtype;
    const auto layout = lay_out(items, outline);
    const auto rank = whole ? 0 : std::min(policy_.rank, layout.world - 1);
    const auto part = layout.part * bytes_of(compute);
    GroupBytes bytes;
    bytes.part = whole ? 0 : part;
    if (!whole) {
      result_.parameters += layout.part * bytes_of(own);
      for (const auto& item : items) {
        bytes.full += static_cast<int64_t>(layout::aligned(count(item.parameter) * bytes_of(compute)));
      }
      if (policy_.is_flat) bytes.full = layout.world * part;
      if (!policy_.is_flat && layout.world > 1) bytes.gathered = layout.world * part;
      if (layout.world > 1 && compute != own) bytes.sent = part;
      const auto holders = policy_.reshard && policy_.reshard->ranks() ? *policy_.reshard->ranks() : 1;
      if (holders > 1 && holders < layout.world) bytes.held = layout.world / holders * part;
      const auto direct = policy_.is_flat || bytes.held > 0 ? 0 : placed(layout, compute);
      bytes.gathers_into_full = policy_.is_flat || direct > 0;
      bytes.gathered -= direct * bytes_of(compute);
    }
    std::vector<size_t> trained;
    for (size_t i = 0; i < items.size(); ++i) {
      const auto& parameter = items[i].parameter;
      if (whole) result_.parameters += count(parameter) * bytes_of(own);
      if (!parameter.trained) continue;
      trained.push_back(i);
      const auto piece = layout.cuts[i].piece_numel(rank) * bytes_of(own);
      trained_ += piece;
      gradients_[items[i].number] = count(parameter) * bytes_of(compute);
      if (sum != own || is_alone()) means_ += piece;
    }
    if (trained.empty() || is_alone()) return bytes;
    const auto some = outline.lay_out_some(layout, trained);
    const auto segment = layout::with_counts(some, trained.size(), layout::alignment(bytes_of(sum))) * bytes_of(sum);
    sums_ += segment;
    bytes.sum = segment;
    if (layout.world > 1) bytes.bucket = layout.world * segment;
    return bytes;
  }

  static double work_of(const Parameter& parameter) {
    const bool computes = parameter.sizes.size() > 1 && !parameter.looked_up;
    return computes ? static_cast<double>(count(parameter)) : 0;
  }

  void add_event(const MemoryOutline::Event& event) {
    if (event.kind != StepEvent::Kind::use) {
      events_.push_back({.kind = event.kind, .unit = event.number});
    } else if (owners_[event.number]) {
      events_.push_back(
          {.kind = StepEvent::Kind::use,
           .unit = *owners_[event.number],
           .gradient = gradients_[event.number],
           .group = groups_[event.number],
           .moves_at_once = group::Gradients::moves_at_once(count(outline_.parameters[event.number])),
           .work = work_of(outline_.parameters[event.number])});
    }
  }

  const MemoryOutline& outline_;
  const MemoryPolicy& policy_;
  /// By parameter: the bytes of its whole gradient, the number of its group, and its unit.
  std::vector<int64_t> gradients_;
  std::vector<size_t> groups_;
  std::vector<std::optional<size_t>> owners_;
  std::vector<UnitBytes> units_;
  std::vector<StepEvent> events_;
  int64_t trained_ = 0;
  int64_t sums_ = 0;
  int64_t means_ = 0;
  MemoryEstimate result_;
};

} // namespace

bool sums_in_stream_on(std::optional<c10::DeviceType> device) {
  return device.value_or(comm::usual_device()) != at::kCPU;
}

void set_ranks(MemoryPolicy& policy, int64_t world, int64_t copies, int64_t rank, double factor) {
  if (world < 1 || copies < 1 || world % copies != 0) {
    throw ValueError(c10::str(
        "shardwise: estimate: there are ", world, " ranks and ", copies,
        " copies of each shard; both must be 1 or more, and the number of copies must divide the number of ranks."));
  }
  if (rank < 0 || rank >= world / copies) {
    throw ValueError(c10::str(
        "shardwise: estimate: rank is ", rank, ", but ", world / copies,
        " ranks hold different shards; it must be from 0 to ", world / copies - 1, "."));
  }
  if (!(factor >= 0)) {
    throw ValueError(c10::str("shardwise: estimate: optimizer_factor is ", factor, "; it must be 0 or more."));
  }
  policy.shards = policy.replicates ? 1 : world / copies;
  policy.copies = policy.replicates ? world : copies;
  policy.rank = policy.replicates ? 0 : rank;
  policy.optimizer_factor = factor;
}

MemoryEstimate estimate(const MemoryOutline& outline, const MemoryPolicy& policy) {
  return Estimate(outline, policy).result();
}

TimeEstimate estimate_time(
    const MemoryOutline& outline, const MemoryPolicy& policy, const Links& links, double compute) {
  const auto check = [](double value, const char* what, bool may_be_zero) {
    if (value > 0 || (may_be_zero && value == 0)) return;
    throw ValueError(c10::str(
        "shardwise: estimate_time(): ", what, " is ", value, "; it must be ",
        may_be_zero ? "0 or more." : "positive."));
  };
  check(compute, "the time to compute", true);
  check(static_cast<double>(links.ranks_per_host()), "the number of ranks on a host", true);
  const auto world = policy.shards * policy.copies;
  const auto host = links.ranks_per_host() > 0 ? links.ranks_per_host() : world;
  if (host > 1) check(links.inside().bytes_per_second, "the bandwidth within a host", false);
  if (host < world) check(links.between().bytes_per_second, "the bandwidth between hosts", false);
  for (const auto& link : {links.inside(), links.between()}) check(link.latency, "a link's latency", true);
  return Estimate(outline, policy).time(links, compute);
}

} // namespace shardwise::engine
