#include <shardwise/hooks.h>

#include <shardwise/detail/hooks.h>
#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>

namespace shardwise {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyModulePlaceholder;
using torch::nn::AnyValue;
using Content = std::unique_ptr<AnyModulePlaceholder>;

// The only way to the private content of an AnyModule: an explicit instantiation may name private members.
Content& content_of(AnyModule& module);

template <Content AnyModule::*Member>
struct ContentAccess {
  friend Content& content_of(AnyModule& module) {
    return module.*Member;
  }
};
template struct ContentAccess<&AnyModule::content_>;

/// AnyModule::get() and at<T>() cast the content to the AnyModuleHolder of the type that type_info names, and read its
/// only member. So an observer has the layout that all these holders share, with the same pointer in it.
struct HolderLayout : AnyModulePlaceholder {
  using AnyModulePlaceholder::AnyModulePlaceholder;
  std::shared_ptr<void> module;
};
using SomeHolder = torch::nn::AnyModuleHolder<torch::nn::SequentialImpl, torch::Tensor>;
static_assert(sizeof(HolderLayout) == sizeof(SomeHolder) && alignof(HolderLayout) == alignof(SomeHolder));
static_assert(sizeof(std::shared_ptr<void>) == sizeof(SomeHolder::module));

/// Wraps the content of an AnyModule, and fires hooks when it is called.
class Observer final : public HolderLayout {
 public:
  // The cast to HolderLayout is valid by layout, not by class.
  __attribute__((no_sanitize("vptr"))) explicit Observer(Content observed)
      : HolderLayout(observed->type_info),
        observed_(std::move(observed)) {
    base_ = observed_->ptr().get();
    module = static_cast<HolderLayout&>(*observed_).module;
    if (const auto seen = observed_->ptr(); module.owner_before(seen) || seen.owner_before(module)) {
      throw Error(c10::str(
          "shardwise: the calls of ", base_->name(),
          " cannot be observed: an AnyModule is laid out differently in this build of torch. Use the version of torch "
          "that shardwise was built for."));
    }
  }

  AnyValue forward(std::vector<AnyValue>&& arguments) override;

  std::shared_ptr<torch::nn::Module> ptr() override {
    return observed_->ptr();
  }

  Content copy() const override {
    return std::make_unique<Observer>(observed_->copy());
  }

  Content clone_module(std::optional<torch::Device> device) const override {
    return observed_->clone_module(device);
  }

  Content take() {
    return std::move(observed_);
  }

 private:
  Content observed_;
  torch::nn::Module* base_;
};

void observe_call(AnyModule& module) {
  auto& content = content_of(module);
  if (!content || dynamic_cast<Observer*>(content.get()) != nullptr) return;
  content = std::make_unique<Observer>(std::move(content));
}

void unobserve(AnyModule& module) {
  auto& content = content_of(module);
  if (auto* observer = dynamic_cast<Observer*>(content.get())) content = observer->take();
}

/// Calls visit(AnyModule&) for everything that containers at and below a module call.
template <typename Visit>
void for_each_callee(torch::nn::Module& module, const Visit& visit) {
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module)) {
    for (auto& child : *sequential) visit(child);
  } else if (auto* transformer = dynamic_cast<torch::nn::TransformerImpl*>(&module)) {
    visit(transformer->encoder);
    visit(transformer->decoder);
  } else if (auto* encoder = dynamic_cast<torch::nn::TransformerEncoderImpl*>(&module)) {
    visit(encoder->norm);
  } else if (auto* decoder = dynamic_cast<torch::nn::TransformerDecoderImpl*>(&module)) {
    visit(decoder->norm);
  }
  for (const auto& child : module.named_children()) for_each_callee(*child.value(), visit);
}

/// The same with the AnyModule itself.
template <typename Visit>
void for_each_callee(AnyModule& module, const Visit& visit) {
  if (module.is_empty()) return;
  visit(module);
  for_each_callee(*module.ptr(), visit);
}

template <typename... Ts>
struct Types {};

/// The types that an AnyValue is searched for.
using Known = Types<
    at::Tensor, std::optional<at::Tensor>, std::vector<at::Tensor>, std::tuple<at::Tensor>,
    std::tuple<at::Tensor, at::Tensor>, std::tuple<at::Tensor, at::Tensor, at::Tensor>,
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>, std::pair<at::Tensor, at::Tensor>,
    std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>, std::tuple<at::Tensor, std::vector<at::Tensor>>,
    std::tuple<at::Tensor, std::optional<at::Tensor>>, std::optional<std::tuple<at::Tensor, at::Tensor>>>;

template <typename Function, typename... Ts>
void visit_known(AnyValue& value, Function& function, Types<Ts...>) {
  const auto visit = [&]<typename T>(T* known) {
    if (known != nullptr) detail::TensorsIn<T>::visit(*known, function);
    return known != nullptr;
  };
  (visit(value.try_get<Ts>()) || ...);
}

} // namespace

template <>
struct detail::TensorsIn<AnyValue> {
  static constexpr bool any = true;
  template <typename Function>
  static void visit(AnyValue& value, Function& function) {
    visit_known(value, function, Known());
  }
};

AnyValue Observer::forward(std::vector<AnyValue>&& arguments) {
  const auto run = [this](std::vector<AnyValue>&& values) { return observed_->forward(std::move(values)); };
  return detail::call_with_hooks(*base_, run, std::move(arguments));
}

void observe_calls(torch::nn::Module& root) {
  for_each_callee(root, observe_call);
}

void observe_calls(AnyModule& module) {
  for_each_callee(module, observe_call);
}

void unobserve_calls(torch::nn::Module& root) {
  for_each_callee(root, unobserve);
}

void unobserve_calls(AnyModule& module) {
  for_each_callee(module, unobserve);
}

} // namespace shardwise
