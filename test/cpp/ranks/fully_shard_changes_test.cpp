// fully_shard(): models that are cast, moved, copied or loaded after they were wrapped.
#include "ranks/fully_shard_models.h"

#include <ATen/ops/_cudnn_rnn_flatten_weight.h>

namespace shardwise::test {
namespace {

using torch::Tensor;

void in_small_worlds(const std::function<void(Rank&)>& fn) {
  on_ranks(fn, {1, 3});
}

template <typename Model>
void cast(Pair<Model>& both, torch::Dtype dtype) {
  both.each([&](Model& model) {
    model->to(dtype);
    model->zero_grad();
  });
}

} // namespace

TEST(FullyShardChanges, CastsInTheMiddleOfTraining) {
  // T06, R32: full copies that are kept must not stay in the old type; the optimizer goes on.
  in_small_worlds([](Rank& rank) {
    for (const bool reshard : {true, false}) {
      auto both = stacks(rank, sharded_on(rank).reshard_after_forward(reshard));
      unit(*both.ours).set_reshard_after_backward(reshard);
      both.train(stack_loss, 2);
      for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kDouble}) {
        cast(both, dtype);
        both.check("cast");
        // Adam's state does not follow to(): a program makes it anew.
        Pair<Stack> next{rank, both.ours, both.reference};
        next.train(stack_loss, 3, 10);
        ASSERT_EQ(both.ours->head->weight.dtype(), dtype);
      }
    }
  });
}

TEST(FullyShardChanges, CastOfOnePart) {
  // A unit whose parameters were of one type has two groups from then on, and one again.
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    fully_shard(ours, sharded_on(rank));
    const auto loss = [](torch::nn::Sequential& model, int step, int r) {
      auto& last = model->at<torch::nn::LinearImpl>(2);
      const auto x = torch::tanh(model->at<torch::nn::LinearImpl>(0).forward(batch(step, r, 3)));
      return last.forward(x.to(last.weight.dtype())).pow(2).sum().to(torch::kDouble);
    };
    Pair<torch::nn::Sequential>{rank, ours, reference}.train(loss, 2);
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      for (auto* model : {&ours, &reference}) (*model)[2]->to(dtype);
      // The full members follow when they are used: this program asks for their type before that.
      unit(*ours).unshard();
      Pair<torch::nn::Sequential>{rank, ours, reference}.train(loss, 3, 10);
      ASSERT_EQ(unit(*ours).plan().units[0].groups.size(), dtype == torch::kDouble ? 2U : 1U);
    }
  });
}

TEST(FullyShardChanges, ShardsAreReplacedOnPurpose) {
  // R51: what is written to a shard by any way counts at the next forward, also while full copies are kept.
  in_small_worlds([](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank).reshard_after_forward(false));
    unit(*both.ours).set_reshard_after_backward(false);
    const std::vector<std::function<void(Tensor&)>> writes{
        [](Tensor& p) { p.mul_(0.5); },
        [](Tensor& p) { p.data().add_(0.01); },
        [](Tensor& p) { p.detach().sub_(0.02); },
        [](Tensor& p) { p.set_data(p.detach() * 1.5); },
        [](Tensor& p) { p.copy_(p.clone().sin()); },
        [](Tensor& p) { torch::add_out(p, p.detach(), p.detach(), 0.25); }};
    for (size_t i = 0; i < writes.size(); ++i) {
      both.train(stack_loss, 2, 10 * static_cast<int>(i));
      const torch::NoGradGuard guard;
      both.each([&](Stack& model) {
        for (auto& parameter : model->parameters()) writes[i](parameter);
      });
      both.check(c10::str("write ", i));
      assert_close(both.ours->forward(tokens(1, 0)), both.reference->forward(tokens(1, 0)), c10::str("write ", i));
    }
  });
}

TEST(FullyShardChanges, BetweenTwoUsesOfAUnit) {
  // Nothing ends between them that would close it: the second one sees what was changed after the first.
  in_small_worlds([](Rank& rank) {
    using Linear = torch::nn::Linear;
    Pair<Linear> both{rank, Linear(5, 3), Linear(5, 3)};
    both.each([](Linear& model) { fill(*model); });
    fully_shard(both.ours, sharded_on(rank));
    const auto x = batch(0, rank.rank(), 5);
    const auto use = [&](Linear& model) { return x.matmul(model->weight.t()); };
    const auto change = [&](const std::function<void(Tensor)>& act) {
      assert_close(use(both.ours), use(both.reference), "before");
      both.each([&](Linear& model) { act(model->parameters()[0]); });
      const auto mine = use(both.ours);
      const auto theirs = use(both.reference);
      assert_close(mine, theirs, "after");
      ASSERT_EQ(mine.requires_grad(), theirs.requires_grad());
    };
    change([](Tensor weight) { weight.set_data(weight.detach() * 1.5); });
    change([](Tensor weight) { weight.requires_grad_(false); });
    change([](Tensor weight) { weight.requires_grad_(true); });
    change([](Tensor weight) {
      const torch::NoGradGuard guard;
      weight.mul_(0.5);
    });
    both.train([](Linear& model, int step, int r) { return model->forward(batch(step, r, 5)).pow(2).sum(); }, 3);
  });
}

namespace {

struct RecurrentImpl : torch::nn::Module {
  RecurrentImpl() {
    fill(*this);
  }
  Tensor forward(const Tensor& x) {
    auto y = std::get<0>(lstm->forward(x));
    y = std::get<0>(gru->forward(y));
    y = std::get<0>(tanh->forward(y));
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(y, torch::tensor({4, 3, 1}));
    y = std::get<0>(relu->forward_with_packed_input(packed)).data();
    return head->forward(cell->forward(y));
  }
  torch::nn::LSTM lstm = register_module(
      "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(3, 4).num_layers(2).bidirectional(true).proj_size(2)));
  torch::nn::GRU gru = register_module("gru", torch::nn::GRU(4, 2));
  torch::nn::RNN tanh = register_module("tanh", torch::nn::RNN(2, 2));
  torch::nn::RNN relu = register_module("relu", torch::nn::RNN(torch::nn::RNNOptions(2, 3).nonlinearity(torch::kReLU)));
  torch::nn::GRUCell cell = register_module("cell", torch::nn::GRUCell(3, 2));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(2, 1));
};
TORCH_MODULE(Recurrent);

Tensor recurrent_loss(Recurrent& model, int step, int rank) {
  const auto x = torch::randn({4, 3, 3}, generator(1000 * step + rank));
  return model->forward(x.to(model->parameters()[0].dtype())).pow(2).sum();
}

} // namespace

TEST(FullyShardChanges, RecurrentModulesAfterTo) {
  // T07: to() makes their own list of weights anew from the registry, where the shards are. With a hidden size of 2,
  // shards of two ranks have shapes that would compute something.
  in_small_worlds([](Rank& rank) {
    for (const bool is_nested : {true, false}) {
      // T23: what keeps the full leaves alive goes with the module.
      c10::weak_intrusive_ptr<at::TensorImpl> leaf{c10::intrusive_ptr<at::TensorImpl>()};
      {
        Recurrent ours;
        leaf = ours->lstm->all_weights()[0].getIntrusivePtr();
        const auto options = sharded_on(rank).reshard_after_forward(is_nested);
        if (is_nested) {
          for (const auto& child : ours->children()) fully_shard(*child, options);
        }
        fully_shard(ours, options);
        Recurrent reference;
        auto both = pair(rank, ours, reference);
        both.train(recurrent_loss, 1);
        for (const auto dtype : {torch::kFloat, torch::kDouble}) {
          cast(both, dtype);
          pair(rank, ours, reference).train(recurrent_loss, 3, 10);
        }
        const torch::NoGradGuard guard;
        assert_close(recurrent_loss(ours, 1, 0), recurrent_loss(reference, 1, 0), "evaluation");
        ASSERT_FALSE(leaf.expired());
      }
      ASSERT_TRUE(leaf.expired());
    }
  });
}

TEST(FullyShardChanges, RecurrentModulesOfReplicate) {
  // T07, T08: its members and the registry hold the same tensors.
  run_ranks(2, [](Rank& rank) {
    Recurrent ours, reference;
    replicate(ours, on(rank));
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      auto both = pair_of_copies(rank, ours, reference);
      cast(both, dtype);
      both.train(recurrent_loss, 3);
    }
  });
}

TEST(FullyShardChanges, ShardsAreNotFlattenedForCudnn) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::LSTM lstm(3, 4);
    fully_shard(lstm, sharded_on(rank));
    const auto before = lstm->parameters()[0].detach().clone();
    const torch::NoGradGuard guard;
    at::_cudnn_rnn_flatten_weight(lstm->parameters(), 4, 3, 2, 4, 0, 1, false, false);
    assert_close(lstm->parameters()[0], before, "shard");
  });
}

TEST(FullyShardChanges, ACloneIsAnError) {
  // T24: it would be a plain module that computes with shards as if they were whole parameters.
  in_small_worlds([](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    fully_shard(ours->ptr(0), sharded_on(rank));
    fully_shard(ours, sharded_on(rank));
    Pair<torch::nn::Sequential> both{rank, ours, mlp({3, 4, 2})};
    const auto loss = [](torch::nn::Sequential& model, int step, int r) {
      return model->forward(batch(step, r, 3)).pow(2).sum();
    };
    both.train(loss, 2);
    for (const auto& device : {std::optional<torch::Device>(), std::optional<torch::Device>(torch::kCPU)}) {
      const auto name = c10::str("rank ", rank.rank());
      expect_error<Error>([&] { ours->clone(device); }, {name, "'0.weight'", "clone()", "copy_()"});
      expect_error<Error>([&] { ours->ptr(2)->clone(device); }, {name, "'2.weight'", "clone()", "copy_()"});
    }
    torch::nn::LSTM lstm(3, 4);
    fully_shard(lstm, sharded_on(rank));
    expect_error<Error>([&] { lstm->clone(); }, {"weight_ih_l0"});
    both.train(loss, 2, 10);
  });
}

TEST(FullyShardChanges, ACloneOfWholeParametersIsWhole) {
  // T24: ParameterList stays whole on every rank, and so does its copy; replicate's is a plain module of its own.
  run_ranks(2, [](Rank& rank) {
    torch::nn::ParameterList list;
    list->append(torch::ones({3}));
    fully_shard(list, sharded_on(rank));
    const auto plain = mlp({3, 2});
    auto replicated = mlp({3, 2});
    replicate(replicated, on(rank));
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(replicated->clone());
    assert_same(*copy, *plain, "the copy of a replicated module");
    copy->forward(batch(0, rank.rank(), 3)).sum().backward();
    for (const auto& parameter : replicated->parameters()) ASSERT_FALSE(parameter.grad().defined());
    ASSERT_EQ(unit(*replicated).counters().all_reduces, 0);
  });
}

} // namespace shardwise::test
