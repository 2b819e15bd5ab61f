// Several threads and one model.
#include "ranks/sharded_models.h"
#include "support/expect.h"

#include "observe/step_point.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/StreamGuard.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <thread>

namespace shardwise::test::threads {
namespace {

using torch::Tensor;

/// Runs in the operation below.
std::function<void()>& inside() {
  static thread_local std::function<void()> function;
  return function;
}

Tensor pass_on(const Tensor& tensor) {
  if (inside()) inside()();
  return tensor.clone();
}

TORCH_LIBRARY(shardwise_test_threads, library) {
  library.def("pass_on(Tensor x) -> Tensor", &pass_on);
}

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(6, 6));
    register_module("layers", layers);
    fill(*this);
  }
  Tensor forward(Tensor x) {
    static const auto operation = c10::Dispatcher::singleton()
                                      .findSchemaOrThrow("shardwise_test_threads::pass_on", "")
                                      .typed<Tensor(const Tensor&)>();
    for (const auto& each : *layers) {
      auto& layer = *each->as<torch::nn::Linear>();
      const torch::NoGradGuard guard;
      x = torch::tanh(torch::linear(x, operation.call(layer.weight), layer.bias));
    }
    return x;
  }
  /// Trains.
  Tensor loss(const Tensor& x) {
    auto out = x;
    for (const auto& each : *layers) out = torch::tanh(each->as<torch::nn::Linear>()->forward(out));
    return out.pow(2).sum();
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Model);

enum class Kind { sharded, kept, cast, replicated };

void wrap(Model& model, Kind kind, Rank& rank) {
  const auto parts = [&](const auto& function) {
    for (const auto& each : *model->layers) function(*each);
    function(*model);
  };
  if (kind == Kind::replicated || kind == Kind::cast) {
    auto options = on(rank);
    // The full copies are casts.
    if (kind == Kind::cast) options.mixed_precision(MixedPrecision().param_dtype(torch::kDouble));
    parts([&](torch::nn::Module& module) { replicate(module, options); });
  } else {
    const auto options = sharded_on(rank).reshard_after_forward(kind == Kind::sharded);
    parts([&](torch::nn::Module& module) { fully_shard(module, options); });
  }
}

/// Another thread of the program, which goes on on the stream of this one.
std::thread thread_beside(at::Device device, const std::function<void()>& act) {
  if (device.is_cpu()) return std::thread(act);
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return std::thread([=] {
    const c10::StreamGuard guard(stream);
    act();
  });
}

/// What its call raises.
std::string error_in_thread(Rank& rank, const std::function<void()>& act) {
  std::string text;
  thread_beside(rank.mesh().device(), [&] { text = text_of(act); }).join();
  return text;
}

void expect_refusal(const std::string& text, Kind kind) {
  if (kind == Kind::replicated) {
    EXPECT_EQ(text, "no error");
  } else {
    expect_text(text, {"a model that thread "});
  }
}

} // namespace

TEST(Threads, OneOfThemAtATimeUsesAModel) {
  for (const auto kind : {Kind::sharded, Kind::kept, Kind::cast, Kind::replicated}) {
    run_ranks(2, [&](Rank& rank) {
      Model ours, reference;
      wrap(ours, kind, rank);
      const auto x = batch(0, rank.rank(), 6);
      const auto expected = reference->forward(x);
      std::string text;
      int calls = 0;
      inside() = [&] {
        if (calls++ == 1) text = error_in_thread(rank, [&] { ours->forward(x); });
      };
      const auto out = ours->forward(x);
      inside() = {};
      expect_refusal(text, kind);
      EXPECT_TRUE(torch::allclose(out.to(torch::kFloat), expected));
      // One after the other they may.
      EXPECT_EQ(
          error_in_thread(rank, [&] { EXPECT_TRUE(torch::allclose(ours->forward(x).to(torch::kFloat), expected)); }),
          "no error");
    });
  }
}

TEST(Threads, NoneUsesAModelWhileAnotherRunsItsBackward) {
  for (const auto kind : {Kind::sharded, Kind::kept, Kind::replicated}) {
    run_ranks(2, [&](Rank& rank) {
      Model ours, reference, neighbour;
      wrap(ours, kind, rank);
      wrap(neighbour, kind, rank);
      const auto layer = [](Model& model, int i, const Tensor& x) {
        return torch::tanh(model->layers[i]->as<torch::nn::Linear>()->forward(x));
      };
      for (int step = 0; step < 3; ++step) {
        std::string reading, training, beside;
        const auto x = batch(step, rank.rank(), 6);
        const auto other_loss = ours->loss(x), neighbours_loss = neighbour->loss(x);
        const auto middle = layer(ours, 0, x);
        middle.register_hook([&](const Tensor& gradient) {
          reading = error_in_thread(rank, [&] { ours->forward(x); });
          // A device has one thread for all backwards.
          if (!rank.mesh().device().is_cpu()) return gradient;
          training = error_in_thread(rank, [&] { other_loss.backward(); });
          // Its sums would go between those of this one, anywhere.
          beside = error_in_thread(rank, [&] { neighbours_loss.backward(); });
          return gradient;
        });
        layer(ours, 1, middle).pow(2).sum().backward();
        expect_refusal(reading, kind);
        for (const auto& error : {training, beside}) {
          if (rank.mesh().device().is_cpu()) expect_refusal(error, Kind::sharded);
        }
        reference_backward(
            rank, [&](int r) { return layer(reference, 1, layer(reference, 0, batch(step, r, 6))).pow(2).sum(); });
        for (const auto& name : {"layers.0.weight", "layers.0.bias", "layers.1.weight"}) {
          const auto whole = reference->named_parameters()[name].grad();
          assert_close(
              ours->named_parameters()[name].grad(), kind == Kind::replicated ? whole : piece_of(whole, rank), name);
        }
        ours->zero_grad();
        reference->zero_grad();
      }
    });
  }
}

TEST(Threads, OutputsAreRightOrAnError) {
  for (const auto kind : {Kind::sharded, Kind::kept, Kind::cast, Kind::replicated}) {
    run_ranks(1, [&](Rank& rank) {
      Model ours, reference;
      wrap(ours, kind, rank);
      const auto x = batch(0, 0, 6);
      const auto expected = reference->forward(x);
      std::atomic<int> right = 0, wrong = 0;
      const auto evaluate = [&] {
        for (int i = 0; i < 200; ++i) {
          try {
            torch::allclose(ours->forward(x).to(torch::kFloat), expected) ? ++right : ++wrong;
          } catch (const Error& error) {
            expect_refusal(error.what(), kind);
          }
        }
      };
      auto other = thread_beside(rank.mesh().device(), evaluate);
      evaluate();
      other.join();
      EXPECT_EQ(wrong, 0);
      EXPECT_GT(right, 0);
      EXPECT_TRUE(torch::allclose(ours->forward(x).to(torch::kFloat), expected));
    });
  }
}

TEST(Threads, AGatherThatFailedServesNobody) {
  for (const bool is_kept : {false, true}) {
    std::mutex mutex;
    std::set<std::thread::id> failed;
    observe::set_step_point_hook([&](observe::StepPoint point) {
      const std::lock_guard lock(mutex);
      if (point == observe::StepPoint::unshard && failed.insert(std::this_thread::get_id()).second) {
        throw std::runtime_error("no memory");
      }
    });
    run_ranks(2, [&](Rank& rank) {
      Model ours, reference;
      wrap(ours, is_kept ? Kind::kept : Kind::sharded, rank);
      const auto x = batch(0, rank.rank(), 6);
      EXPECT_ANY_THROW(ours->forward(x));
      EXPECT_TRUE(ours->forward(x).equal(reference->forward(x)));
    });
    observe::set_step_point_hook({});
  }
}

} // namespace shardwise::test::threads
