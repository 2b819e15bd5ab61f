#include "transport/backend.h"

#include "base/reason.h"
#include "transport/error.h"
#include "transport/sums.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace shardwise::transport {
namespace {

using c10d::OpType;

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

void require(bool holds, const char* collective, const char* rule) {
  if (!holds) raise_value_error(c10::str("shardwise: ", collective, " needs ", rule, "."));
}

void require_plain(const at::Tensor& tensor, const char* collective) {
  require(tensor.is_cpu() && tensor.layout() == at::kStrided, collective, "dense tensors on the CPU");
  require(tensor.is_contiguous(), collective, "contiguous tensors");
}

/// A tensor of a call, and its name in errors.
struct Argument {
  const char* name;
  const at::Tensor& tensor;
};

/// Raises c10::ValueError unless `whole` has `times` as many elements as `part`, and the same dtype.
void require_sizes(const Argument& whole, const Argument& part, int64_t times, const char* collective) {
  require_plain(whole.tensor, collective);
  require_plain(part.tensor, collective);
  if (whole.tensor.scalar_type() != part.tensor.scalar_type()) {
    raise_value_error(c10::str(
        "shardwise: ", collective, " needs an input and an output of the same dtype, and got an ", whole.name, " of ",
        whole.tensor.scalar_type(), " and an ", part.name, " of ", part.tensor.scalar_type(), "."));
  }
  if (whole.tensor.numel() != part.tensor.numel() * times) {
    raise_value_error(c10::str(
        "shardwise: ", collective, " needs an ", whole.name, " of ", times == 1 ? "" : c10::str(times, " times "),
        "as many elements as the ", part.name, ", and got an ", whole.name, " of ", whole.tensor.numel(), " and an ",
        part.name, " of ", part.tensor.numel(), " elements."));
  }
}

/// Raises c10::ValueError unless `output` has as many elements as an all-gather of `input` leaves for it.
void require_output(const at::Tensor& output, const at::Tensor& input, int world, const DirectPlacement* placement) {
  constexpr auto kCollective = "all_gather_into_tensor";
  if (placement == nullptr) return require_sizes({"output", output}, {"input", input}, world, kCollective);
  require_plain(output, kCollective);
  require_plain(input, kCollective);
  const auto& ranges = placement->ranges;
  const auto placed = std::accumulate(
      ranges.begin(), ranges.end(), size_t{0}, [](size_t sum, const auto& range) { return sum + range.bytes; });
  require(
      output.dtype() == input.dtype() && output.nbytes() + placed == input.nbytes() * static_cast<size_t>(world),
      kCollective, "an output of the input's dtype for exactly what has no place in other memory");
}

bool sums(c10d::ReduceOp::RedOpType op, at::ScalarType dtype) {
  const bool mean = op == c10d::ReduceOp::AVG;
  return (mean || op == c10d::ReduceOp::SUM) && can_add_up(dtype, mean);
}

std::vector<std::byte*> places_in(const at::Tensor& whole, int world) {
  std::vector<std::byte*> places;
  for (int rank = 0; rank < world; ++rank) places.push_back(data_of(whole) + rank * (whole.nbytes() / world));
  return places;
}

/// The destinations of each rank's part, which has `part` bytes.
std::vector<Spans> spans_in(const at::Tensor& output, int world, size_t part, const DirectPlacement* placement) {
  static const std::vector<DirectPlacement::Range> none;
  const auto& ranges = placement == nullptr ? none : placement->ranges;
  auto range = ranges.begin();
  auto* rest = data_of(output);
  std::vector<Spans> all(static_cast<size_t>(world));
  size_t done = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto add = [&](std::byte* to, size_t bytes) {
      if (bytes > 0) all[rank].emplace_back(to, bytes);
      done += bytes;
    };
    const auto add_rest = [&](size_t end) { add(std::exchange(rest, rest + (end - done)), end - done); };
    for (const auto end = (rank + 1) * part; done < end;) {
      const bool has_range = range != ranges.end() && range->offset < end;
      add_rest(has_range ? range->offset : end);
      if (!has_range) continue;
      add(data_of(placement->memory) + range->to, range->bytes);
      ++range;
    }
  }
  return all;
}

std::vector<const std::byte*> readable(const std::vector<std::byte*>& places) {
  return {places.begin(), places.end()};
}

std::vector<std::byte*> places_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::byte*> places;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(places), data_of);
  return places;
}

Outcome outcome_of(const std::vector<at::Tensor>& tensors) {
  return {.value = tensors, .tensors = tensors};
}

} // namespace

Backend::Backend(
    std::unique_ptr<Carrier> carrier, std::unique_ptr<Exchange> exchange, std::chrono::milliseconds timeout,
    std::string transport_name, uint64_t group)
    : c10d::Backend(exchange->rank(), exchange->world()),
      timeout_(timeout),
      transport_name_(std::move(transport_name)),
      issued_(group),
      worker_(std::move(carrier), std::move(exchange)) {}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_.load());
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  worker_.gloo()->setTimeout(timeout);
}

std::chrono::milliseconds Backend::time(std::chrono::milliseconds given) const {
  return given > std::chrono::milliseconds(0) ? given : timeout_.load();
}

uint64_t Backend::sent_to(int peer) const {
  return worker_.sent_to(peer);
}

void Backend::abort() {
  worker_.close();
}

void Backend::shutdown() {
  worker_.close();
}

Backend::WorkPtr Backend::issue(OpType type, const char* title, const Tensors& seen, DirectWork::Run run) {
  auto work = c10::make_intrusive<DirectWork>(getRank(), type, title, seen, std::move(run));
  work->set_number(issued_.group(), issued_.next());
  worker_.issue(work);
  return work;
}

void Backend::begin_after(std::function<void()> ready) {
  const auto wait = [ready = std::move(ready)](Exchange& /*exchange*/, Carrier& carrier) -> Outcome {
    try {
      ready();
    } catch (const std::exception& error) {
      carrier.progress().fail(c10::str(
          "shardwise: ", carrier.progress().me(), ": a tensor did not come from its device: ", base::reason(error)));
    }
    return {};
  };
  worker_.issue(c10::make_intrusive<DirectWork>(getRank(), OpType::UNKNOWN, "shardwise:copy", Tensors(), wait));
}

Call Backend::call_of(
    Kind kind, const at::Tensor& tensor, std::chrono::milliseconds timeout, c10d::ReduceOp::RedOpType op,
    int64_t root) const {
  const Signature signature{
      .kind = kind, .op = op, .dtype = tensor.scalar_type(), .elements = tensor.numel(), .root = root};
  return {signature, time(timeout)};
}

Backend::WorkPtr Backend::stage(
    OpType type, const Tensors& reads, const Tensors& writes,
    c10::function_ref<WorkPtr(const Staging::Copies& copies)> start) {
  std::optional<c10::Device> device;
  for (const auto* tensors : {&reads, &writes}) {
    for (const auto& tensor : *tensors) {
      if (!device) device = tensor.device();
      if (tensor.device() == *device && tensor.layout() == at::kStrided) continue;
      raise_value_error(c10::str(
          "shardwise: a collective needs dense tensors that are all on the same device, and got one of ",
          tensor.layout(), " on ", tensor.device(), " beside the first, on ", *device, "."));
    }
  }
  auto& staging = [&]() -> Staging& {
    const std::lock_guard lock(mutex_);
    return stagings_.try_emplace(*device, *device).first->second;
  }();
  return staging.carry(
      type, reads, writes, [this](std::function<void()> ready) { begin_after(std::move(ready)); }, start);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const auto type = tensors.size() == 1 ? OpType::ALLREDUCE : OpType::ALLREDUCE_COALESCED;
  return pass(type, tensors, [&](Tensors& own) {
    std::vector<Call> calls;
    for (const auto& tensor : own) {
      require(tensor.is_cpu() && tensor.layout() == at::kStrided, "all_reduce", "dense tensors on the CPU");
      require(
          tensor.is_non_overlapping_and_dense(), "all_reduce",
          "tensors without gaps: contiguous, or a permutation of a contiguous one. Reduce a contiguous() copy instead");
      calls.push_back(call_of(Kind::all_reduce, tensor, options.timeout, options.reduceOp));
    }
    return issue(
        type, "shardwise:all_reduce", own,
        [tensors = own, calls, options](Exchange& exchange, Carrier& carrier) mutable {
          for (size_t i = 0; i < tensors.size(); ++i) {
            const auto dtype = tensors[i].scalar_type();
            const auto op = options.reduceOp;
            if (sums(op, dtype) && !exchange.leaves_all_reduce_to_gloo(tensors[i].nbytes(), dtype, op)) {
              exchange.all_reduce(calls[i], data_of(tensors[i]));
            } else {
              Tensors one{tensors[i]};
              exchange.announce(calls[i]);
              carrier.wait(*carrier.gloo().allreduce(one, options));
            }
          }
          return outcome_of(tensors);
        });
  });
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  only(tensors, "all_reduce");
  return allreduce_coalesced(tensors, {options});
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto type = inputs.size() == 1 ? OpType::_ALLGATHER_BASE : OpType::COALESCED;
  return pass(type, outputs, inputs, [&](Tensors& out, Tensors& in) {
    require(out.size() == in.size(), "all_gather_into_tensor", "an output for each input");
    const auto* placement = DirectPlacementScope::current();
    std::vector<Call> calls;
    std::vector<std::vector<Spans>> places;
    for (size_t i = 0; i < in.size(); ++i) {
      require_output(out[i], in[i], getSize(), placement);
      auto& call = calls.emplace_back(call_of(Kind::all_gather, in[i], options.timeout));
      places.push_back(spans_in(out[i], getSize(), in[i].nbytes(), placement));
      for (const auto& each : places.back()) call.signature.pieces += placement == nullptr ? 0 : each.size();
    }
    return issue(
        type, "shardwise:all_gather", in,
        [outputs = out, inputs = in, memory = placement == nullptr ? at::Tensor() : placement->memory,
         places = std::move(places), calls](Exchange& exchange, Carrier& /*carrier*/) {
          for (size_t i = 0; i < inputs.size(); ++i) exchange.all_gather(calls[i], places[i], data_of(inputs[i]));
          return outcome_of(outputs);
        });
  });
}

Backend::WorkPtr Backend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return pass(OpType::ALLGATHER, outputs, inputs, [&](TensorLists& out, Tensors& in) {
    require(in.size() == 1 && out.size() == 1, "all_gather", "one input and one list of outputs per rank");
    const auto& places = out.front();
    require(places.size() == static_cast<size_t>(getSize()), "all_gather", "an output for each rank");
    for (const auto& place : places) require_sizes({"output", place}, {"input", in.front()}, 1, "all_gather");
    const auto call = call_of(Kind::all_gather, in.front(), options.timeout);
    return issue(
        OpType::ALLGATHER, "shardwise:all_gather", in,
        [places, input = in.front(), call](Exchange& exchange, Carrier& /*carrier*/) {
          std::vector<Spans> spans;
          for (auto* place : places_of(places)) spans.push_back({{place, input.nbytes()}});
          exchange.all_gather(call, spans, data_of(input));
          return outcome_of(places);
        });
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto type = inputs.size() == 1 ? OpType::_REDUCE_SCATTER_BASE : OpType::COALESCED;
  return pass(type, outputs, inputs, [&](Tensors& out, Tensors& in) {
    require(out.size() == in.size(), "reduce_scatter_tensor", "an output for each input");
    std::vector<Call> calls;
    for (size_t i = 0; i < in.size(); ++i) {
      require_sizes({"input", in[i]}, {"output", out[i]}, getSize(), "reduce_scatter_tensor");
      calls.push_back(call_of(Kind::reduce_scatter, out[i], options.timeout, options.reduceOp));
    }
    return issue(
        type, "shardwise:reduce_scatter", in,
        [outputs = out, inputs = in, calls, options](Exchange& exchange, Carrier& carrier) mutable {
          for (size_t i = 0; i < inputs.size(); ++i) {
            if (sums(options.reduceOp, inputs[i].scalar_type())) {
              const auto places = readable(places_in(inputs[i], exchange.world()));
              exchange.reduce_scatter(calls[i], data_of(outputs[i]), places);
            } else {
              exchange.announce(calls[i]);
              carrier.wait(*carrier.gloo()._reduce_scatter_base(outputs[i], inputs[i], options));
            }
          }
          return outcome_of(outputs);
        });
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Backend::WorkPtr Backend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  return pass(OpType::REDUCE_SCATTER, outputs, inputs, [&](Tensors& out, TensorLists& in) {
    require(in.size() == 1 && out.size() == 1, "reduce_scatter", "one list of inputs and one output per rank");
    const auto& places = in.front();
    require(places.size() == static_cast<size_t>(getSize()), "reduce_scatter", "an input for each rank");
    for (const auto& place : places) require_sizes({"input", place}, {"output", out.front()}, 1, "reduce_scatter");
    const auto call = call_of(Kind::reduce_scatter, out.front(), options.timeout, options.reduceOp);
    if (!sums(options.reduceOp, call.signature.dtype)) {
      return run_on_gloo(
          OpType::REDUCE_SCATTER, "shardwise:reduce_scatter", places, call,
          [outputs = out, inputs = in, options](auto& gloo) mutable {
            return gloo.reduce_scatter(outputs, inputs, options);
          });
    }
    return issue(
        OpType::REDUCE_SCATTER, "shardwise:reduce_scatter", places,
        [places, output = out.front(), call](Exchange& exchange, Carrier& /*carrier*/) {
          exchange.reduce_scatter(call, data_of(output), readable(places_of(places)));
          return outcome_of({output});
        });
  });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  const Call call{.signature = {}, .timeout = time(options.timeout)};
  return issue(OpType::BARRIER, "shardwise:barrier", {}, [call](Exchange& exchange, Carrier& /*carrier*/) {
    exchange.announce(call);
    return outcome_of({});
  });
}

} // namespace shardwise::transport
