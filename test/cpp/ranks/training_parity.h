#pragma once

// Trains a program in one process with the data of all ranks, then on ranks, and compares after every step.
#include "ranks/delays.h"
#include "ranks/sharded_models.h"

namespace shardwise::test {

/// The head of a language model; its weight may be the embedding's.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const torch::Tensor& table) : weight(register_parameter("weight", table)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::linear(x, weight);
  }
  torch::Tensor weight;
};
TORCH_MODULE(TiedHead);

template <typename Model>
struct Program {
  /// The same values at every call.
  std::function<Model()> make;
  /// `number` counts forwards; the data differs with it and with the rank.
  std::function<torch::Tensor(Model&, int number, int rank)> loss;
  int steps = by_form(3, 10);
  /// Forwards and backwards a step, whose gradients add up.
  int parts = 1;
  /// In which it is compared first; then in double precision.
  torch::ScalarType dtype = torch::kFloat;
};

/// Data in the dtype of the model.
template <typename Model>
torch::Tensor batch_for(const Model& model, int number, int rank, int64_t width) {
  return batch(number, rank, width).to(model->parameters().front().dtype());
}

/// With Adam's own epsilon, elements whose gradient is nearly zero would be moved by the noise in it.
template <typename Model>
torch::optim::AdamW optimizer_of(const Model& model) {
  return torch::optim::AdamW(each_once(*model), torch::optim::AdamWOptions(0.05).eps(0.1));
}

/// A step in one process.
struct ExpectedStep {
  /// By part and rank.
  std::vector<std::vector<torch::Tensor>> losses;
  /// By name. Undefined where there is no gradient.
  std::map<std::string, torch::Tensor> gradients;
  /// After the optimizer.
  std::map<std::string, torch::Tensor> values;
};

inline std::map<std::string, torch::Tensor> copy_values(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> values;
  for (const auto& entry : module.named_parameters()) values[entry.key()] = entry.value().detach().clone();
  return values;
}

inline std::map<std::string, torch::Tensor> copy_gradients(const torch::nn::Module& module) {
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& entry : module.named_parameters()) {
    const auto& gradient = entry.value().grad();
    gradients[entry.key()] = gradient.defined() ? gradient.clone() : gradient;
  }
  return gradients;
}

/// What one process computes with the data of all ranks: in the program's dtype and in double precision.
template <typename Model>
struct Expected {
  Expected(Program<Model> what, int ranks)
      : program(std::move(what)),
        world(ranks),
        single(run(program.dtype)),
        precise(run(torch::kDouble)) {}

  Program<Model> program;
  int world;
  std::vector<ExpectedStep> single;
  std::vector<ExpectedStep> precise;

 private:
  std::vector<ExpectedStep> run(torch::ScalarType dtype) const {
    auto model = program.make();
    model->to(dtype);
    auto optimizer = optimizer_of(model);
    std::vector<ExpectedStep> steps(program.steps);
    for (int step = 0; step < program.steps; ++step) {
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
      for (int part = 0; part < program.parts; ++part) {
        auto& losses = steps[step].losses.emplace_back();
        for (int rank = 0; rank < world; ++rank) {
          auto loss = program.loss(model, step * program.parts + part, rank);
          losses.push_back(loss.detach());
          (loss / world).backward();
        }
      }
      steps[step].gradients = copy_gradients(*model);
      optimizer.step();
      steps[step].values = copy_values(*model);
    }
    return steps;
  }
};

/// Rows run on 2 ranks, and on this many.
inline const int kSecondWorld = by_form(3, 4);

template <typename Model>
std::vector<Expected<Model>> expect_alone(const Program<Model>& program) {
  return {Expected<Model>(program, 2), Expected<Model>(program, kSecondWorld)};
}

using DimOf = std::function<int64_t(const std::string& name, const torch::Tensor& whole)>;

/// Calls on one rank.
struct Collectives {
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  int64_t all_reduces = 0;
};

/// Between steps, parameters and gradients.
inline void assert_on_the_host(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    ASSERT_TRUE(parameter.is_cpu());
    ASSERT_TRUE(!parameter.grad().defined() || parameter.grad().is_cpu());
  }
}

/// How a program comes to run on ranks.
template <typename Model>
struct Wrapping {
  std::function<void(Model&, Rank&)> wrap;
  /// The dimension that a parameter is cut along; -1: every rank has all of it.
  DimOf dim = [](const std::string&, const torch::Tensor&) { return 0; };
  /// How many pieces there are; 0: one for each rank.
  int64_t shards = 0;
  /// Called before the forward of each part of a step.
  std::function<void(Model&, int part)> before = [](Model&, int) {};
  /// What every step takes.
  std::optional<Collectives> collectives = std::nullopt;
  /// What a rank has of a whole, where it is not a piece along `dim`.
  std::function<torch::Tensor(const Rank& rank, const std::string& name, const torch::Tensor& whole)> piece = nullptr;
  /// Whose data a rank has, of those that one process has.
  std::function<int(const Rank& rank)> data = [](const Rank& rank) { return rank.rank(); };
};

inline int64_t whole(const std::string&, const torch::Tensor&) {
  return -1;
}

/// Losses, gradients and values of every step on a rank.
using Trace = std::vector<torch::Tensor>;

/// What torch::allclose says, in one pass: these rows compare a million small tensors.
inline bool is_close(const torch::Tensor& ours, const torch::Tensor& theirs, double relative, double absolute) {
  const auto a = ours.to(torch::kCPU, torch::kDouble).contiguous();
  const auto b = theirs.to(torch::kCPU, torch::kDouble).contiguous();
  const auto* x = a.const_data_ptr<double>();
  const auto* y = b.const_data_ptr<double>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (!(std::abs(x[i] - y[i]) <= absolute + relative * std::abs(y[i]))) return false;
  }
  return true;
}

/// Each is this rank's piece of what is expected, also whether it is defined at all.
template <typename Model>
void assert_expected(
    const std::map<std::string, torch::Tensor>& ours, const std::map<std::string, torch::Tensor>& single,
    const std::map<std::string, torch::Tensor>& precise, const Rank& rank, const Wrapping<Model>& wrapping,
    const std::string& what) {
  const auto piece_on_rank = [&](const std::string& name, const torch::Tensor& all) {
    return wrapping.piece ? wrapping.piece(rank, name, all)
                          : piece_of(all, rank, wrapping.dim(name, all), wrapping.shards);
  };
  ASSERT_EQ(ours.size(), single.size()) << what;
  for (const auto& [name, value] : ours) {
    const auto text = what + " of " + name + " on " + rank.name();
    const auto& expected = single.at(name);
    ASSERT_EQ(value.defined(), expected.defined()) << text;
    if (!value.defined()) continue;
    const auto piece = piece_on_rank(name, expected);
    ASSERT_EQ(value.sizes(), piece.sizes()) << text;
    ASSERT_EQ(value.dtype(), piece.dtype()) << text;
    ASSERT_TRUE(is_close(value, piece, 1e-5, 1e-6)) << text << "\n" << value << "\n" << piece;
    const auto exact = piece_on_rank(name, precise.at(name));
    const double unit = value.dtype() == torch::kDouble ? 1e-12 : 1e-5;
    ASSERT_TRUE(is_close(value, exact, 10 * unit, unit)) << text << ", exactly\n" << value << "\n" << exact;
  }
}

inline void assert_collectives(const Collectives& expected, const Counters& before, const Counters& after) {
  ASSERT_EQ(after.all_gathers - before.all_gathers, expected.all_gathers);
  ASSERT_EQ(after.reduce_scatters - before.reduce_scatters, expected.reduce_scatters);
  ASSERT_EQ(after.all_reduces - before.all_reduces, expected.all_reduces);
  ASSERT_EQ(after.broadcasts, before.broadcasts);
}

template <typename Model>
void train(Rank& rank, const Expected<Model>& expected, const Wrapping<Model>& wrapping, Trace& trace) {
  const auto& program = expected.program;
  auto model = program.make();
  const auto names = model->named_parameters().keys();
  wrapping.wrap(model, rank);
  ASSERT_EQ(model->named_parameters().keys(), names);
  auto optimizer = optimizer_of(model);
  for (int step = 0; step < program.steps; ++step) {
    const auto what = "step " + std::to_string(step);
    rank.step(what);
    const auto& single = expected.single[step];
    const auto before = unit(*model).counters();
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    for (int part = 0; part < program.parts; ++part) {
      wrapping.before(model, part);
      const auto data = wrapping.data(rank);
      auto loss = program.loss(model, step * program.parts + part, data);
      assert_close(loss.detach(), single.losses[part][data], what + ": loss on " + rank.name());
      trace.push_back(loss.detach());
      loss.backward();
    }
    const auto& precise = expected.precise[step];
    const auto gradients = copy_gradients(*model);
    assert_expected(gradients, single.gradients, precise.gradients, rank, wrapping, what + ": the gradient");
    optimizer.step();
    if (wrapping.collectives) assert_collectives(*wrapping.collectives, before, unit(*model).counters());
    const auto values = copy_values(*model);
    assert_expected(values, single.values, precise.values, rank, wrapping, what + ": the value");
    for (const auto* tensors : {&gradients, &values}) {
      for (const auto& [name, tensor] : *tensors) trace.push_back(tensor);
    }
    if (testing::Test::HasFatalFailure()) return;
  }
}

/// Ranks as threads; gives their traces.
template <typename Model>
std::vector<Trace> train_on_ranks(const Expected<Model>& expected, const Wrapping<Model>& wrapping) {
  std::vector<Trace> traces(expected.world);
  run_ranks(expected.world, [&](Rank& rank) { train(rank, expected, wrapping, traces[rank.rank()]); });
  return traces;
}

inline void assert_same_bits(const std::vector<Trace>& a, const std::vector<Trace>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t rank = 0; rank < a.size(); ++rank) {
    ASSERT_EQ(a[rank].size(), b[rank].size());
    for (size_t i = 0; i < a[rank].size(); ++i) {
      ASSERT_EQ(a[rank][i].defined(), b[rank][i].defined());
      if (!a[rank][i].defined()) continue;
      ASSERT_TRUE(torch::equal(a[rank][i], b[rank][i])) << "rank " << rank << ", entry " << i;
    }
  }
}

/// Runs that must not differ in a bit, whatever is different about them.
class AlikeRuns {
 public:
  template <typename Model>
  void run(const Expected<Model>& expected, const Wrapping<Model>& wrapping) {
    auto traces = train_on_ranks(expected, wrapping);
    if (first_.empty()) {
      first_ = std::move(traces);
    } else {
      assert_same_bits(first_, traces);
    }
  }
  /// Ranks are late: at each of these points, and at all at once.
  template <typename Model>
  void run_late(
      const Expected<Model>& expected, const Wrapping<Model>& wrapping, const std::vector<StepPoint>& points) {
    std::vector<std::optional<StepPoint>> each_and_all(points.begin(), points.end());
    each_and_all.emplace_back();
    for (const auto& point : each_and_all) {
      SCOPED_TRACE(
          point ? "late at point " + std::to_string(static_cast<int>(*point)) : std::string("late at all points"));
      const Delays delays(point);
      run(expected, wrapping);
      ASSERT_GE(delays.passed(), expected.world * expected.program.steps);
    }
  }

 private:
  std::vector<Trace> first_;
};

template <typename Model>
void train_twice(const Expected<Model>& expected, const Wrapping<Model>& wrapping) {
  AlikeRuns runs;
  for (int i = 0; i < 2; ++i) runs.run(expected, wrapping);
}

} // namespace shardwise::test
