#include "engine/backward_watch.h"

#include "base/caller_error.h"
#include "base/weak_table.h"
#include "engine/schedule.h"
#include "engine/unit.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

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

void BackwardWatch::end() {
  // If one tree throws, the others stay in touched_, and the destructor abandons their backward.
  while (!touched_.empty()) {
    const auto tree = *touched_.begin();
    touched_.erase(touched_.begin());
    reached_.contains(tree) ? tree->end_backward() : tree->forget_backward();
  }
}

BackwardWatch::~BackwardWatch() {
  running_backwards().erase(backward_);
  for (const auto& tree : touched_) {
    if (tree->belongs_to_this_thread() && !tree->is_on_device()) tree->abandon_backward();
  }
}

} // namespace shardwise::engine
