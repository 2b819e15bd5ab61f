#include "engine/backward_watch.h"

#include "base/caller.h"
#include "base/weak_table.h"
#include "engine/schedule.h"
#include "engine/unit.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace shardwise::engine {
namespace {

/// All backwards that run in this process: where ranks are threads, those of every rank.
base::WeakTable<int, BackwardWatch>& running_backwards() {
  static auto* table = new base::WeakTable<int, BackwardWatch>;
  return *table;
}

} // namespace

bool BackwardWatch::ByNumber::operator()(const std::shared_ptr<Schedule>& a, const std::shared_ptr<Schedule>& b) const {
  return a->number() < b->number();
}

BackwardWatch::BackwardWatch(int backward) : backward_(backward) {}

bool BackwardWatch::running() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

std::shared_ptr<BackwardWatch> BackwardWatch::current() {
  const int backward = torch::autograd::get_current_graph_task_id();
  return running_backwards().find_or_make(backward, [&] {
    std::shared_ptr<BackwardWatch> watch(new BackwardWatch(backward));
    // Autograd's engine holds the callback, and so the watch, until the backward ends or dies.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [watch] { base::called_by_torch([&] { watch->end(); }); });
    return watch;
  });
}

// Not on a leaf: it outlives this forward, and would keep the hook for good.
void begin_backward_at(const at::Tensor& output, const std::weak_ptr<Unit>& weak) {
  if (!output.requires_grad() || output.is_leaf()) return;
  output.register_hook([weak](const at::Tensor& /*gradient*/) {
    const auto unit = weak.lock();
    if (!unit || !unit->timing().unshard_in_backward) return;
    base::called_by_torch([&] { unit->schedule()->enter(*unit, Keep::outer_and_inner); });
  });
}

void BackwardWatch::arriving(const std::shared_ptr<Schedule>& tree) {
  touched_.insert(tree);
}

void BackwardWatch::arrived(const std::shared_ptr<Schedule>& tree) {
  reached_.insert(tree);
}

// After a backward's last node, the current node is that of a backward around it. On a CPU both run in one thread.
void BackwardWatch::end() {
  const bool is_inner = torch::autograd::get_current_node() != nullptr;
  // If one tree throws, the others stay in touched_, and the destructor abandons their backward.
  while (!touched_.empty()) {
    const auto tree = *touched_.begin();
    touched_.erase(touched_.begin());
    if (!reached_.contains(tree)) {
      tree->forget_backward();
      continue;
    }
    const bool hooks_wait = is_inner && !tree->is_on_device();
    tree->end_backward(/*runs_hooks=*/!hooks_wait);
    if (hooks_wait) hooked_.insert(tree);
  }
  ended_ = true;
  if (is_inner) return;
  for (const auto& tree : std::exchange(hooked_, {})) tree->run_hooks();
}

void BackwardWatch::take_over_hooks(BackwardWatch& inner) {
  hooked_.merge(inner.hooked_);
}

// Autograd destroys a backward when it returns: inside the one around it, if there is one.
BackwardWatch::~BackwardWatch() {
  running_backwards().erase(backward_);
  if (ended_ && !hooked_.empty() && running()) current()->take_over_hooks(*this);
  for (const auto& tree : hooked_) tree->forget_hooks();
  for (const auto& tree : touched_) {
    if (tree->belongs_to_this_thread() && !tree->is_on_device()) tree->abandon_backward();
  }
}

} // namespace shardwise::engine
