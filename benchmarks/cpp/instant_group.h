#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

/// Collectives that are done when they are called, and move nothing: what is left is what they cost the caller.
/// While `answers` is on, a gather gives every rank's part the values of this one, so that comparisons of the ranks
/// when a module is wrapped find them alike.
class InstantBackend : public c10d::Backend {
 public:
  using Result = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using c10d::Backend::Backend;
  bool answers = true;

  const std::string getBackendName() const override {
    return "instant";
  }
  Result broadcast(Tensors&, const c10d::BroadcastOptions&) override {
    return done();
  }
  Result allreduce(Tensors&, const c10d::AllreduceOptions&) override {
    return done();
  }
  Result _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    if (answers) output.view({getSize(), -1}).copy_(input.view({1, -1}).expand({getSize(), input.numel()}));
    return done();
  }
  Result allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (auto& output : outputs.at(0)) output.copy_(inputs.at(0));
    return done();
  }
  Result barrier(const c10d::BarrierOptions&) override {
    return done();
  }
  Result _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return done();
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override {
      return true;
    }
    bool wait(std::chrono::milliseconds) override {
      return true;
    }
  };
  static Result done() {
    return c10::make_intrusive<Done>();
  }
};

/// A process group over that back end.
inline c10::intrusive_ptr<c10d::ProcessGroup> instant_group(const c10::intrusive_ptr<InstantBackend>& backend) {
  using Type = c10d::ProcessGroup::BackendType;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(c10::DeviceType::CPU, Type::CUSTOM, backend);
  group->setDefaultBackend(Type::CUSTOM);
  group->setGroupName("instant");
  return group;
}
