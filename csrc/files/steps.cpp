#include "files/steps.h"

#include "files/place.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>

namespace shardwise::files {
namespace {

constexpr std::string_view kStep = "step-";

/// The step in a name; nothing if it is not one that step_path() gives.
std::optional<int64_t> step_of(const std::string& name) {
  int64_t step = 0;
  if (!name.starts_with(kStep)) return {};
  const auto* end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + kStep.size(), end, step);
  if (error != std::errc() || step < 0 || name_of(step_path(".", step)) != name) return {};
  return step;
}

} // namespace

std::string step_path(const std::string& root, int64_t step) {
  return c10::str(root, "/", kStep, step);
}

std::vector<SavedStep> complete_steps(Disk& disk, const std::string& root) {
  std::vector<SavedStep> steps;
  if (disk.kind(root) != Disk::Kind::folder) return steps;
  for (const auto& name : disk.list(root)) {
    const auto temporary = parse_temporary_name(name);
    const auto step = step_of(temporary ? temporary->place : name);
    const auto path = c10::str(root, "/", name);
    if (!step || !is_complete(disk, path)) continue;
    const bool is_there =
        !temporary || (temporary->kind == TemporaryKind::replaced && !disk.kind(step_path(root, *step)));
    if (is_there) steps.push_back({.step = *step, .path = path});
  }
  std::stable_sort(
      steps.begin(), steps.end(), [](const auto& one, const auto& other) { return one.step < other.step; });
  return steps;
}

std::optional<SavedStep> newest_step(Disk& disk, const std::string& root) {
  auto steps = complete_steps(disk, root);
  if (steps.empty()) return {};
  return steps.back();
}

std::vector<std::string> keep_newest_steps(Disk& disk, const std::string& root, int64_t count) {
  if (count < 1) {
    throw ValueError(
        c10::str("shardwise: ", count, " checkpoints of ", root, " cannot be kept; keep at least 1, the newest."));
  }
  std::vector<std::string> removed;
  const auto steps = complete_steps(disk, root);
  if (static_cast<int64_t>(steps.size()) <= count) return removed;
  disk.sync_folder(root);
  for (auto each = steps.begin(); each != steps.end() - count; ++each) {
    if (!is_ours(disk, each->path)) continue;
    // In one step and for good, so that nobody ever finds half a checkpoint under its name.
    const auto temporary = temporary_path(step_path(root, each->step), TemporaryKind::removing, Owner::next());
    disk.rename(each->path, temporary);
    disk.sync_folder(root);
    remove_temporary_folder(disk, temporary);
    removed.push_back(each->path);
  }
  return removed;
}

} // namespace shardwise::files
