#pragma once

// Mixed precision by hand: parameters rounded to a low precision compute, their gradients are summed in another.
#include "ranks/hybrid_models.h"

namespace shardwise::test {

struct Precision {
  at::ScalarType param = torch::kBFloat16;
  at::ScalarType reduce = torch::kFloat;
  double factor = 0;
  bool divide_after = false;
  /// Whether a parameter keeps its dtype.
  std::function<bool(const std::string& name)> keeps = {};
};

inline MixedPrecision policy(const Precision& precision) {
  return MixedPrecision().param_dtype(precision.param).reduce_dtype(precision.reduce);
}

/// A loss for a model and data of any dtype; `cast` is applied to the data first.
template <typename Model>
using LowLoss = std::function<torch::Tensor(Model&, int step, int rank, std::optional<at::ScalarType> cast)>;

inline torch::Tensor cast_to(const torch::Tensor& x, std::optional<at::ScalarType> dtype) {
  return dtype ? x.to(*dtype) : x;
}

using Layers = torch::nn::Sequential;

/// Of layers that take 6 numbers.
inline torch::Tensor layers_loss(Layers& model, int step, int rank, std::optional<at::ScalarType> cast) {
  return call(*model, cast_to(batch(step, rank, 6), cast)).to(torch::kFloat).pow(2).mean();
}

/// What one process computes for all ranks: gradients of float parameters in .grad, added to what is there.
template <typename Model>
class LowReference {
  std::function<Model()> make_;
  Precision precision_;

 public:
  LowReference(std::function<Model()> make, Precision precision) : make_(std::move(make)), precision_(precision) {}

  Model model = make_();

  /// Sums of several backwards before the division, as backwards without synchronisation leave them.
  void backward(const Rank& rank, const LowLoss<Model>& loss, const std::vector<int>& steps) {
    std::map<std::string, torch::Tensor> sums;
    const double divisor = precision_.factor > 0 ? precision_.factor : rank.world_size();
    const double before = precision_.divide_after ? 1 : divisor;
    for (int r = 0; r < rank.world_size(); ++r) {
      std::map<std::string, torch::Tensor> mine;
      for (const int step : steps) {
        auto low = rounded();
        loss(low, step, r, precision_.param).backward();
        for (const auto& entry : low->named_parameters()) {
          const auto& gradient = entry.value().grad();
          if (!gradient.defined()) continue;
          auto& sum = mine[entry.key()];
          sum = sum.defined() ? sum + gradient
                              : gradient.to(steps.size() > 1 ? precision_.reduce : gradient.scalar_type());
        }
      }
      for (auto& [name, gradient] : mine) {
        auto& sum = sums[name];
        const auto part = gradient.to(precision_.reduce) * (1 / before);
        sum = sum.defined() ? sum + part : part;
      }
    }
    for (const auto& entry : model->named_parameters()) {
      auto sum = sums[entry.key()];
      if (!sum.defined()) continue;
      if (before != divisor) sum = sum * (before / divisor);
      auto& gradient = entry.value().mutable_grad();
      sum = sum.to(entry.value().scalar_type());
      gradient = gradient.defined() ? gradient + sum : sum;
    }
  }

 private:
  Model rounded() const {
    auto low = make_();
    const torch::NoGradGuard guard;
    auto values = model->named_parameters();
    for (auto& entry : low->named_parameters()) entry.value().copy_(values[entry.key()]);
    for (auto& entry : low->named_parameters()) {
      if (precision_.keeps && precision_.keeps(entry.key())) continue;
      entry.value().set_data(entry.value().to(precision_.param));
    }
    return low;
  }
};

/// Trains both for some steps of one or more backwards each. Every bit is compared: on two ranks there is one addition,
/// whose order does not matter.
template <typename Model>
void train_low(
    Rank& rank, Model& ours, LowReference<Model>& reference, const LowLoss<Model>& loss, int64_t shards, int parts = 1,
    const std::function<void(bool last)>& before = {}) {
  torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
  torch::optim::AdamW theirs(reference.model->parameters(), torch::optim::AdamWOptions(0.02));
  for (int step = 0; step < 4; ++step) {
    std::vector<int> numbers;
    for (int part = 0; part < parts; ++part) {
      if (before) before(part == parts - 1);
      numbers.push_back(step * parts + part);
      loss(ours, numbers.back(), rank.rank(), std::nullopt).backward();
    }
    reference.backward(rank, loss, numbers);
    assert_pieces(*ours, *reference.model, rank, c10::str("step ", step), {}, shards, assert_equal);
    mine.step();
    theirs.step();
    mine.zero_grad();
    theirs.zero_grad();
  }
}

} // namespace shardwise::test
