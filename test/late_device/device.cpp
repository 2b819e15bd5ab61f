#include "device.h"

#include "faults.h"
#include "pinned.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>

namespace late {
namespace {

/// On CUDA too, streams of the pool come round again.
constexpr c10::StreamId kPool = 16;

std::function<double(const std::string&, size_t)>& costs() {
  static auto* const function = new std::function<double(const std::string&, size_t)>;
  return *function;
}

std::function<void(const std::function<void()>&)>& around_waits() {
  static auto* const function =
      new std::function<void(const std::function<void()>&)>([](const std::function<void()>& wait) { wait(); });
  return *function;
}

thread_local int current = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

std::string told(const char* what, const Operation& operation) {
  return c10::str(
      "'", operation.name, "' ", what, " on stream ", operation.moment.stream, " (its operation ",
      operation.moment.count, ")");
}

std::string told(const History::Conflict& conflict, const Operation& now, bool writes, const std::string& where) {
  const auto before = conflict.earlier.moment.stream;
  return c10::str(
      told(writes ? "writes" : "reads", now), " ", where, " that ",
      told(conflict.earlier_writes ? "writes" : "reads", conflict.earlier), ", and nothing orders the two: stream ",
      now.moment.stream, " must wait for an event that stream ", before, " records after its operation ",
      conflict.earlier.moment.count, ".");
}

} // namespace

void set_around_waits(std::function<void(const std::function<void()>&)> function) {
  around_waits() = std::move(function);
}

void set_costs(std::function<double(const std::string&, size_t)> function) {
  costs() = std::move(function);
}

int current_device() {
  return current;
}

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "late device: there is no device ", index);
  current = index;
}

c10::Stream current_stream(int device) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)),
      current_streams[device]);
}

c10::Stream exchange_current_stream(const c10::Stream& stream) {
  const auto before = current_stream(stream.device_index());
  current_streams[stream.device_index()] = stream.id();
  return before;
}

Device& Device::of(int index) {
  static const auto* const all = [] {
    auto* devices = new std::vector<std::unique_ptr<Device>>;
    for (int k = 0; k < kDevices; ++k) devices->push_back(std::make_unique<Device>(k));
    return devices;
  }();
  return *all->at(index);
}

Device::Device(int index) : index_(index), memory_(index) {
  for (c10::StreamId id = 0; id <= kPool; ++id) streams_.push_back(std::make_unique<Stream>(index, id));
}

Stream& Device::stream(c10::StreamId id) {
  return *streams_.at(id);
}

c10::Stream Device::stream_of_pool() {
  const std::lock_guard lock(mutex_);
  return stream(1 + static_cast<c10::StreamId>(pool_++ % kPool)).handle();
}

c10::Stream Device::new_stream() {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<Stream>(index_, static_cast<c10::StreamId>(streams_.size())));
  return streams_.back()->handle();
}

Stream& Device::stream_of_task(c10::StreamId id) {
  const std::lock_guard lock(mutex_);
  return stream(id);
}

void Device::issue(
    c10::StreamId id, const char* name, const std::vector<Use>& uses, std::function<void()> run, double cost) {
  const std::lock_guard lock(mutex_);
  auto& to = stream(id);
  to.clock.join(host_);
  const Operation operation{name, to.clock.next(to.number())};
  size_t bytes = 0;
  for (const auto& use : uses) {
    check(use, operation, to.clock);
    bytes += use.end - use.begin;
  }
  if (cost < 0) cost = costs() ? costs()(name, bytes) : 0;
  to.push(std::move(run), host_time_, cost);
}

void Device::check(const Use& use, const Operation& operation, Clock& clock) {
  if (use.begin >= use.end) return;
  if (!is_device_memory(use.begin)) {
    const auto conflict = use_pinned(use.begin, use.end, use.writes, index_, operation, clock);
    if (!conflict) return;
    report(told(*conflict, operation, use.writes, "pinned memory"));
    clock.cover(conflict->earlier.moment);
    return;
  }
  auto& block = memory_.at(use.begin);
  const auto conflict =
      block.history.access(use.begin - block.begin, use.end - block.begin, use.writes, operation, clock);
  if (!conflict) return;
  const auto where = c10::str(
      "bytes ", use.begin - block.begin, " to ", use.end - block.begin, " of block ", block.number, " (", block.size,
      " bytes, taken on stream ", stream(block.owner).number(), ") of device ", index_);
  report(told(*conflict, operation, use.writes, where));
  clock.cover(conflict->earlier.moment);
}

Device::Event Device::record(c10::StreamId id) {
  const std::lock_guard lock(mutex_);
  auto& from = stream(id);
  from.clock.join(host_);
  const auto reaches = std::make_shared<std::promise<double>>();
  Event event{from.clock, reaches->get_future().share()};
  from.push([reaches, &from] { reaches->set_value(from.time()); }, host_time_);
  return event;
}

void Device::wait(c10::StreamId id, const Event& event) {
  const std::lock_guard lock(mutex_);
  auto& to = stream(id);
  to.clock.join(event.clock);
  to.push([reached = event.reached, &to] { to.advance_to(reached.get()); }, host_time_);
}

bool Device::query(const Event& event) {
  if (!event.is_reached()) return false;
  const std::lock_guard lock(mutex_);
  host_knows(event.clock, event.reached.get());
  return true;
}

void Device::synchronize(const Event& event, const char* what) {
  count_host_wait(index_, what);
  double time = 0;
  around_waits()([&] { time = event.reached.get(); });
  const std::lock_guard lock(mutex_);
  host_knows(event.clock, time);
}

void Device::synchronize_all() {
  std::vector<Event> events;
  for (size_t id = 0; id < streams_.size(); ++id) events.push_back(record(static_cast<c10::StreamId>(id)));
  for (const auto& event : events) synchronize(event, "wait for a device");
}

bool Device::is_idle(c10::StreamId id) {
  return stream(id).is_idle();
}

void Device::host_knows(const Clock& clock, double time) {
  host_.join(clock);
  host_time_ = std::max(host_time_, time);
  release_pinned(index_, host_);
}

double Device::host_time() {
  const std::lock_guard lock(mutex_);
  return host_time_;
}

uintptr_t Device::take(size_t size, c10::StreamId id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const auto& given) {
    const bool done =
        std::all_of(given.until.begin(), given.until.end(), [](const auto& each) { return each.is_reached(); });
    if (!done) return false;
    for (const auto& event : given.until) host_knows(event.clock, event.reached.get());
    poison(given.block->begin, given.block->size);
    given.block->history.forget();
    memory_.give(*given.block);
    return true;
  });
  return memory_.take(size, id).begin;
}

void Device::record_stream(uintptr_t address, c10::StreamId id) {
  const std::lock_guard lock(mutex_);
  auto& block = memory_.at(address);
  if (block.owner != id) block.recorded.insert(id);
}

// Whoever may take the memory next writes all of it, as far as anybody knows.
void Device::give(uintptr_t address) {
  std::unique_lock lock(mutex_);
  auto& block = memory_.at(address);
  auto& owner = stream(block.owner);
  const auto recorded = std::exchange(block.recorded, {});
  auto clock = owner.clock;
  clock.join(host_);
  for (const auto id : recorded) clock.join(stream(id).clock);
  const Operation operation{"memory given back", clock.next(owner.number())};
  check({block.begin, block.begin + block.size, true}, operation, clock);
  if (recorded.empty()) {
    owner.clock = clock;
    owner.push([begin = block.begin, size = block.size] { poison(begin, size); }, host_time_);
    memory_.give(block);
    return;
  }
  lock.unlock();
  Given given{&block, {record(block.owner)}};
  for (const auto id : recorded) given.until.push_back(record(id));
  lock.lock();
  waiting_.push_back(std::move(given));
}

size_t Device::used() {
  const std::lock_guard lock(mutex_);
  return memory_.used();
}

size_t Device::peak() {
  const std::lock_guard lock(mutex_);
  return memory_.peak();
}

void Device::reset_peak() {
  const std::lock_guard lock(mutex_);
  memory_.reset_peak();
}

} // namespace late
