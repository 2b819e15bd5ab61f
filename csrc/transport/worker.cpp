#include "transport/worker.h"

#include "base/ends_within.h"
#include "transport/error.h"

#include <shardwise/error.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/thread_name.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace shardwise::transport {
namespace {

constexpr auto kShutDown = "shardwise: this process group was shut down and cannot be used any more.";

} // namespace

DirectWork::DirectWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& tensors, Run run)
    : c10d::Work(rank, type, title, tensors),
      run_(std::move(run)),
      title_(title),
      elements_(tensors.empty() ? -1 : tensors.front().numel()),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool DirectWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout && !isCompleted()) {
    try {
      WaitObserver::wait([this] { return as_seen(); }, [this](auto time) { return base::ends_within(*this, time); });
    } catch (const Error& error) {
      raise_backend_error(error.what());
    }
  }
  return c10d::Work::wait(timeout);
}

ProgramCall DirectWork::as_seen() const {
  const std::string title = title_;
  const auto name = title.substr(title.find(':') + 1);
  return {
      .group = group_,
      .number = number_,
      .what = elements_ < 0 ? name : c10::str(name, " of ", elements_, " elements")};
}

std::vector<at::Tensor> DirectWork::result() {
  TORCH_CHECK(isCompleted(), "shardwise: result() was called before the collective finished. Call wait() first.");
  return tensors_;
}

// Tensors captured by `run_` are released before anyone learns that the work is done.
void DirectWork::run(Exchange& exchange, Carrier& carrier) {
  Outcome outcome;
  try {
    outcome = run_(exchange, carrier);
  } catch (...) {
    const auto error = std::current_exception();
    // Peers may still read what this call gives up: they hear first.
    if (carrier.progress().broken()) exchange.end();
    return fail(error);
  }
  run_ = nullptr;
  tensors_ = std::move(outcome.tensors);
  future_->markCompleted(std::move(outcome.value));
  finish();
}

void DirectWork::fail(std::exception_ptr error) {
  run_ = nullptr;
  future_->setError(error);
  finish(std::move(error));
}

struct Worker::State {
  State(std::unique_ptr<Carrier> over, std::unique_ptr<Exchange> of)
      : carrier(std::move(over)),
        exchange(std::move(of)) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<DirectWork>> works;
  bool closed = false;
  /// Outlives the exchange, which uses it.
  const std::unique_ptr<Carrier> carrier;
  const std::unique_ptr<Exchange> exchange;

  void run() {
    c10::setThreadName("shardwise_sums");
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !works.empty(); });
      if (works.empty()) break;
      auto work = std::move(works.front());
      works.pop_front();
      lock.unlock();
      work->run(*exchange, *carrier);
      work.reset();
      if (carrier->progress().broken()) carrier->release();
      lock.lock();
    }
    lock.unlock();
    exchange->end();
    carrier->release();
  }
};

Worker::Worker(std::unique_ptr<Carrier> carrier, std::unique_ptr<Exchange> exchange)
    : state_(std::make_shared<State>(std::move(carrier), std::move(exchange))) {
  thread_ = std::thread([state = state_] { state->run(); });
}

Worker::~Worker() {
  close();
}

// A forked child has no worker thread, and whichever thread held the lock may be missing too.
void Worker::require_not_forked() const {
  if (base::forks() == forks_) return;
  raise_backend_error(
      "shardwise: this process was forked from a rank and cannot use that rank's process group. Start it with spawn or "
      "forkserver, or make a new process group in it after the fork.");
}

void Worker::issue(c10::intrusive_ptr<DirectWork> work) {
  require_not_forked();
  const std::lock_guard lock(state_->mutex);
  if (state_->closed) raise_backend_error(kShutDown);
  state_->works.push_back(std::move(work));
  state_->changed.notify_one();
}

c10::intrusive_ptr<c10d::Backend> Worker::gloo() const {
  require_not_forked();
  if (auto gloo = state_->carrier->shared_gloo()) return gloo;
  const std::lock_guard lock(state_->mutex);
  if (state_->closed) raise_backend_error(kShutDown);
  // The worker's thread writes the failure before it lets go of Gloo.
  raise_backend_error(c10::str(
      "shardwise: a collective of this process group failed earlier, so it cannot be used any more. Make a new "
      "process group. The first failure: ",
      state_->carrier->progress().failure()));
}

uint64_t Worker::sent_to(int peer) const {
  return state_->exchange->sent_to(peer);
}

void Worker::close() {
  if (base::forks() != forks_) {
    // The connections belong to the parent. The state is leaked on purpose: its thread does not exist here.
    if (!thread_.joinable()) return;
    static_cast<void>(new std::shared_ptr<State>(state_));
    return thread_.detach();
  }
  {
    const std::lock_guard lock(state_->mutex);
    if (std::exchange(state_->closed, true)) return;
    state_->changed.notify_all();
  }
  state_->carrier->close();
  // A callback on the worker's own thread may release the process group.
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  thread_.join();
}

} // namespace shardwise::transport
