// Random models, divided by random plans and wrapped in random ways, against one process.
#include "programs/random.h"
#include "ranks/split_models.h"

namespace shardwise::test {
namespace {

constexpr int64_t kWidth = 12;
constexpr int64_t kTokens = 10;
/// Axes of 2, 3 and 4 divide it.
constexpr int64_t kSequence = 12;

using Function = std::function<torch::Tensor(const torch::Tensor&)>;

/// A part of a model: its modules, and what it computes with them.
struct PartImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = x;
    for (int i = 0; i < times; ++i) {
      const auto z = checkpoints ? activation_checkpoint(run, y) : run(y);
      y = adds ? y + z : z;
    }
    return y;
  }
  torch::nn::Linear linear(const std::string& name, int64_t in, int64_t out, bool bias) {
    return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)));
  }
  Function run;
  int times = 1;
  bool adds = false;
  bool checkpoints = false;
};
TORCH_MODULE(Part);

/// The model that a seed stands for, and the plan for it.
class RandomNet {
 public:
  explicit RandomNet(uint64_t seed) : random_(seed) {
    table_ = torch::nn::Embedding(kTokens, kWidth);
    model_->register_module("table", table_);
    const int way = random_.below(3);
    if (way == 0) plan_.emplace_back("table", vocabulary());
    if (way == 1) plan_.emplace_back("table", colwise().gather_output(true));
    for (int i = random_.between(2, 5); i > 0; --i) add_part();
    if (random_.chance(50) && way != 1) {
      const auto tied = model_->register_module("head", TiedHead(table_->weight));
      if (way == 0) plan_.emplace_back("head", colwise().gather_output(true));
      head_ = [=](const torch::Tensor& x) { return tied->forward(x); };
    } else {
      const auto last = model_->register_module("last", torch::nn::Linear(kWidth, kTokens));
      head_ = [=](const torch::Tensor& x) { return last->forward(x); };
      plan_.emplace_back("last", colwise().gather_output(true));
    }
    fill(*model_, static_cast<int>(seed % 1000));
    model_->to(torch::kDouble);
    // So that training does not make rounding grow.
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model_->parameters()) parameter.mul_(0.3);
  }

  torch::Tensor loss(int step, int64_t replica) {
    const auto tokens = torch::randint(kTokens, {2, kSequence}, generator(100 * step + replica), torch::kLong);
    auto x = table_(tokens);
    for (auto& part : parts_) x = part(x);
    const auto logits = head_(x);
    return torch::cross_entropy_loss(logits.flatten(0, 1), tokens.roll(1, 1).flatten());
  }
  torch::nn::Module& model() {
    return *model_;
  }
  const SplitPlan& plan() const {
    return plan_;
  }
  std::vector<Part>& parts() {
    return parts_;
  }

 private:
  void add_part() {
    Part part;
    const auto name = "part" + std::to_string(parts_.size());
    const auto divide = [&](const std::string& what, const Split& split) {
      plan_.emplace_back(name + "." + what, split);
    };
    const int64_t hidden = random_.between(1, 9);
    const bool bias = random_.chance(60);
    const auto act = random_.of<at::Tensor (*)(const at::Tensor&)>({at::tanh, at::sigmoid, at::silu});
    switch (random_.below(7)) {
      case 0: {
        auto up = part->linear("up", kWidth, hidden, bias);
        auto down = part->linear("down", hidden, kWidth, bias);
        divide("up", colwise());
        divide("down", rowwise());
        part->run = [=](const torch::Tensor& x) mutable { return down(act(up(x))); };
        break;
      }
      case 1: {
        auto layer = part->linear("layer", kWidth, kWidth, bias);
        divide("layer", colwise().gather_output(true));
        part->run = [=](const torch::Tensor& x) mutable { return act(layer(x)); };
        break;
      }
      case 2: {
        auto layer = part->linear("layer", kWidth, kWidth, bias);
        divide("layer", rowwise().split_input(true));
        part->run = [=](const torch::Tensor& x) mutable { return act(layer(x)); };
        break;
      }
      case 3: {
        const auto up = part->register_parameter("up", torch::randn({kWidth, hidden}));
        const auto down = part->register_parameter("down", torch::randn({hidden, kWidth}));
        divide("up", colwise().transposed(true));
        divide("down", rowwise().transposed(true));
        part->run = [=](const torch::Tensor& x) { return act(x.matmul(up)).matmul(down); };
        break;
      }
      case 4: {
        Heads heads = part->register_module("heads", Heads(kWidth, kWidth));
        divide("heads.in", colwise().segments(3).heads(kWidth));
        divide("heads.out", rowwise().heads(kWidth));
        part->run = [=](const torch::Tensor& x) mutable { return heads(x); };
        break;
      }
      case 5: {
        torch::nn::LayerNorm norm = part->register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}));
        part->run = [=](const torch::Tensor& x) mutable { return norm(x); };
        break;
      }
      default: {
        // In between each rank has a part of the sequence.
        auto in = part->linear("in", kWidth, kWidth, bias);
        torch::nn::LayerNorm norm = part->register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{kWidth}));
        auto up = part->linear("up", kWidth, hidden, bias);
        auto down = part->linear("down", hidden, kWidth, bias);
        divide("in", rowwise().split_input(true).sequence_dim(1));
        divide("norm", sequence());
        divide("up", colwise().sequence_dim(1));
        divide("down", rowwise());
        part->run = [=](const torch::Tensor& x) mutable { return down(act(up(norm(in(x))))); };
      }
    }
    part->times = random_.chance(20) ? 2 : 1;
    part->adds = random_.chance(50);
    part->checkpoints = random_.chance(25);
    model_->register_module(name, part);
    parts_.push_back(part);
  }

  Random random_;
  torch::nn::ModuleHolder<torch::nn::Module> model_{std::make_shared<torch::nn::Module>("net")};
  torch::nn::Embedding table_{nullptr};
  std::vector<Part> parts_;
  Function head_;
  SplitPlan plan_;
};

/// How a divided model comes onto the other axis of its mesh.
void wrap(RandomNet& net, const Mesh& along, Random random) {
  const int way = random.below(4);
  if (way == 0) {
    replicate(net.model(), ReplicateOptions().mesh(along));
    return;
  }
  const auto options = FullyShardOptions()
                           .mesh(along)
                           .layout(way == 1 ? ShardLayout::flat : ShardLayout::rows)
                           .reshard_after_forward(random.chance(70));
  for (auto& part : net.parts()) {
    if (random.chance(60) && !part->parameters().empty()) fully_shard(part, options);
  }
  fully_shard(net.model(), options);
}

void train(uint64_t seed) {
  Random random(seed);
  const int64_t axis = random.between(2, 4);
  const int64_t copies = axis < 3 ? random.between(1, 2) : 1;
  const bool wraps = copies > 1 || random.chance(50);
  const double lr = 0.05;
  run_ranks(static_cast<int>(axis * copies), [&](Rank& rank) {
    const auto mesh = rank.mesh({{"dp", copies}, {"tp", axis}});
    RandomNet ours(seed);
    RandomNet reference(seed);
    parallelize(ours.model(), mesh, "tp", ours.plan());
    if (wraps) wrap(ours, mesh.along({"dp"}), random);
    torch::optim::SGD mine(each_once(ours.model()), torch::optim::SGDOptions(lr).momentum(0.5));
    torch::optim::SGD theirs(each_once(reference.model()), torch::optim::SGDOptions(lr).momentum(0.5));
    for (int step = 0; step < 3; ++step) {
      const auto what = c10::str("step ", step);
      rank.step(what);
      mine.zero_grad();
      theirs.zero_grad();
      // Gradients of two backwards add up.
      for (int part = 0; part < 2; ++part) {
        ours.loss(2 * step + part, mesh.coordinate("dp")).backward();
        for (int64_t i = 0; i < copies; ++i) (reference.loss(2 * step + part, i) / copies).backward();
      }
      mine.step();
      theirs.step();
      expect_near(full_state_dict(ours.model()), full_state_dict(reference.model()), what);
    }
  });
}

} // namespace

TEST(TensorParallelRandom, ModelsTrainAsInOneProcess) {
  const int programs = is_long_form() ? 300 : 12;
  for (int i = 0; i < programs && !HasFailure(); ++i) {
    // The first one has pieces without elements in one flat storage with others.
    const auto seed = static_cast<uint64_t>(7000 + i);
    SCOPED_TRACE(c10::str("seed ", seed));
    train(seed);
  }
}

} // namespace shardwise::test
