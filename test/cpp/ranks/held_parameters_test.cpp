// What a program has of its parameters before it wraps: handles on them change nothing, and what lies in their memory
// is an error.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

/// Takes its parameters from registries, in the three ways that torch knows, and in a container made from torch's.
struct KeptListImpl : torch::nn::ParameterListImpl {};
TORCH_MODULE(KeptList);

struct RegistriesImpl : torch::nn::Module {
  RegistriesImpl() {
    // Pieces that would compute something: a row is broadcast.
    for (int i = 0; i < 2; ++i) list->append(torch::zeros({2, 4}).requires_grad_());
    dict->insert("scale", torch::zeros({2}).requires_grad_());
    kept->append(torch::zeros({2, 1}).requires_grad_());
    fill(*this);
    // T31: the first one of head stays in the registry.
    head->weight = first->weight;
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first->forward(x);
    for (const auto& entry : *list) x = torch::tanh(x + entry.value().sum(0));
    return head->forward(x * (*dict)["scale"].sum() + (*kept)[0].sum());
  }
  torch::nn::ParameterList list = register_module("list", torch::nn::ParameterList());
  torch::nn::ParameterDict dict = register_module("dict", torch::nn::ParameterDict());
  KeptList kept = register_module("kept", KeptList());
  torch::nn::Linear first = register_module("first", torch::nn::Linear(4, 4));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Registries);

const Dims kWholeOnes{{"list.0", -1}, {"list.1", -1}, {"dict.scale", -1}, {"kept.0", -1}, {"head.weight", -1}};

/// Of any model that takes four numbers.
const auto held_loss = [](auto& model, int step, int rank) {
  return model->forward(batch(step, rank, 4)).pow(2).mean();
};

/// A class of a program's own, which has no member for what it registers.
struct BankImpl : torch::nn::Module {
  BankImpl() {
    register_parameter("bank", torch::zeros({2, 4}));
    fill(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(head->forward(x) + named_parameters(/*recurse=*/false)["bank"].sum(0));
  }
  torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 4));
};
TORCH_MODULE(Bank);

std::vector<FullyShardOptions> both_layouts(Rank& rank) {
  return {sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat)};
}

struct ViewedImpl : torch::nn::Module {
  explicit ViewedImpl(bool view) {
    fill(*this);
    if (view) turned = linear->weight.t();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x.matmul(turned.defined() ? turned : linear->weight.t()) + linear->bias;
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 4));
  torch::Tensor turned;
};
TORCH_MODULE(Viewed);

MemoryEstimate estimate_of(const torch::nn::Module& model, const Rank& rank) {
  return estimate_memory(model, FullyShardOptions(), 2, EstimateOptions().rank(rank.rank()));
}

} // namespace

TEST(HeldParameters, ChangeNothing) {
  // T38: by nobody, by everybody, or by one rank alone.
  run_ranks(2, [](Rank& rank) {
    for (const int holders : {0, 1, 2}) {
      Registries ours, reference;
      std::vector<torch::Tensor> held;
      if (rank.rank() < holders) held = ours->parameters();
      const auto estimate = estimate_of(*ours, rank);
      fully_shard(ours, sharded_on(rank));
      Pair<Registries> both{rank, ours, reference};
      both.dims = kWholeOnes;
      both.train(held_loss, 3);
      EXPECT_EQ(estimate.parameters, estimate_of(*reference, rank).parameters);
      held.clear();
      both.train(held_loss, 2, 10);
    }
  });
}

TEST(HeldParameters, OfAClassOfYourOwn) {
  // Nothing else holds it: that is certain, on whichever rank it is seen.
  run_ranks(2, [](Rank& rank) {
    for (const int holders : {0, 1}) {
      Bank ours, reference;
      std::vector<torch::Tensor> held;
      if (rank.rank() < holders) held = ours->parameters();
      fully_shard(ours, sharded_on(rank));
      Pair<Bank> both{rank, ours, reference};
      both.dims = {{"bank", -1}};
      both.train(held_loss, 3);
    }
  });
}

TEST(HeldParameters, OfAClassOfYourOwnThatIsHeldOnAllRanks) {
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : both_layouts(rank)) {
      Bank ours, reference;
      const auto held = ours->parameters();
      fully_shard(ours, options);
      const auto text = c10::str("rank ", rank.rank());
      const auto sum = [&] { return ours->named_parameters()["bank"].sum(); };
      expect_error<Error>([&] { sum().backward(); }, {text, "'bank'", "never used", "whole_parameters()"});
      expect_error<Error>([&] { held_loss(ours, 0, rank.rank()); }, {text, "'bank'", "alone", "whole_parameters()"});
    }
    Bank ours, reference;
    const auto held = ours->parameters();
    fully_shard(ours, sharded_on(rank).whole_parameters({ours->named_parameters()["bank"]}));
    Pair<Bank> both{rank, ours, reference};
    both.dims = {{"bank", -1}};
    both.train(held_loss, 3);
  });
}

TEST(HeldParameters, PenaltiesAreNoUseOfTheRegistry) {
  // A term over parameters() brings gradients to shards of classes whose members nobody knows.
  run_ranks(2, [](Rank& rank) {
    struct OwnImpl : torch::nn::Module {
      OwnImpl() {
        fill(*this);
      }
      torch::Tensor weight = register_parameter("weight", torch::zeros({4, 4}));
    };
    struct AroundImpl : torch::nn::Module {
      torch::Tensor forward(const torch::Tensor& x) {
        return x.matmul(own->weight);
      }
      std::shared_ptr<OwnImpl> own = register_module("own", std::make_shared<OwnImpl>());
    };
    using Around = torch::nn::ModuleHolder<AroundImpl>;
    Around ours(std::make_shared<AroundImpl>()), reference(std::make_shared<AroundImpl>());
    const auto held = ours->parameters();
    fully_shard(ours, sharded_on(rank));
    Pair<Around>{rank, ours, reference}.train(
        [](Around& model, int step, int r) {
          return held_loss(model, step, r) + 0.1 * model->parameters()[0].pow(2).sum();
        },
        3);
  });
}

TEST(Aliases, AreRefusedOnAllRanks) {
  // T39: a view that is a member, an alias that a program keeps, a graph, a buffer; on one rank only.
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : both_layouts(rank)) {
      for (const std::string kind : {"view", "alias", "graph", "buffer", "nested"}) {
        SCOPED_TRACE(kind);
        Viewed ours(kind == "view" && rank.rank() == 1);
        torch::Tensor kept;
        if (rank.rank() == 1) {
          if (kind == "alias") kept = ours->linear->weight.detach();
          if (kind == "graph") kept = ours->forward(batch(0, 1, 4).requires_grad_()).sum();
          if (kind == "nested") kept = ours->linear->weight.data();
        }
        if (kind == "buffer") ours->register_buffer("copy", ours->linear->weight.detach());
        const auto remedy = {"rank 1", "linear.weight'", "clone()", "allow_aliases(true)"};
        expect_error<Error>(
            [&] { kind == "nested" ? fully_shard(ours->linear, options) : fully_shard(ours, options); },
            kind == "buffer"   ? std::vector<std::string>{"'linear.weight'"}
            : kind == "nested" ? std::vector<std::string>{"rank 1", "'weight'"}
                               : std::vector<std::string>(remedy.begin(), remedy.end()));
        // Nothing was changed.
        ASSERT_TRUE(ours->linear->parameters()[0].is_same(ours->linear->weight));
      }
    }
    Viewed cast(true);
    expect_error<Error>(
        [&] { replicate(cast, on(rank).mixed_precision(MixedPrecision().param_dtype(torch::kBFloat16))); },
        {"'linear.weight'"});
    // Its parameters stay where they are.
    replicate(cast, on(rank));
  });
}

TEST(Aliases, MayBeAllowed) {
  run_ranks(2, [](Rank& rank) {
    Viewed ours(false), reference(false);
    const auto before = ours->linear->weight.detach();
    const auto values = before.clone();
    fully_shard(ours, sharded_on(rank).allow_aliases(true));
    Pair<Viewed>{rank, ours, reference}.train(held_loss, 3);
    assert_close(before, values, "the alias");
  });
}

TEST(Aliases, WhatIsNone) {
  // Handles, gradients, optimizers, views that parameters were made from, parameters side by side in one memory.
  run_ranks(2, [](Rank& rank) {
    struct PackedImpl : torch::nn::Module {
      PackedImpl() {
        auto memory = torch::zeros({4, 6});
        weight = register_parameter("weight", memory.narrow(0, 0, 2));
        other = register_parameter("other", memory.narrow(0, 2, 2));
        shaped = register_parameter("shaped", torch::zeros({12}).view({2, 6}));
        fill(*this);
      }
      torch::Tensor forward(const torch::Tensor& x) {
        return x.matmul(weight.t()) + x.matmul(other.t()) * x.matmul(shaped.t());
      }
      torch::Tensor weight, other, shaped;
    };
    using Packed = torch::nn::ModuleHolder<PackedImpl>;
    const auto loss = [](Packed& model, int step, int r) { return model->forward(batch(step, r, 6)).pow(2).mean(); };
    Packed ours(std::make_shared<PackedImpl>()), reference(std::make_shared<PackedImpl>());
    for (auto* model : {&ours, &reference}) {
      loss(*model, 99, 0).backward();
      (*model)->zero_grad();
    }
    const auto held = ours->named_parameters();
    fully_shard(ours, sharded_on(rank));
    Pair<Packed>{rank, ours, reference}.train(loss, 3);
  });
}

TEST(Aliases, ParametersThatOverlap) {
  run_ranks(2, [](Rank& rank) {
    struct OverlappingImpl : torch::nn::Module {
      torch::Tensor weight = register_parameter("weight", torch::zeros({4, 4}));
      torch::Tensor same = register_parameter("same", weight.detach());
    };
    const auto model = std::make_shared<OverlappingImpl>();
    expect_error<Error>([&] { fully_shard(*model, sharded_on(rank)); }, {"'weight'", "is shared with a tensor"});
  });
}

} // namespace shardwise::test
