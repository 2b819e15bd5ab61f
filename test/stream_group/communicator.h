#pragma once

#include "thread_group/streams.h"
#include "thread_group/work.h"

#include <c10/core/Event.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace stream_group {

/// One call of one rank: an operation, or several that were called together.
struct Call {
  explicit Call(const c10::Device& device) : end(device.type()), future(thread_group::future_on(device)) {}

  /// How many of its operations are not issued yet.
  size_t missing = 0;
  /// Recorded after the last of them.
  c10::Event end;
  /// It is, and whoever waits may go on.
  bool issued = false;
  thread_group::Future future;
  std::vector<at::Tensor> results;
  std::chrono::milliseconds timeout{0};
  std::chrono::steady_clock::time_point deadline;
};

/// What the ranks of a communicator have in common: they are threads, and all on one device. Their hosts meet here.
/// Each leaves what it brings and goes on; the last to come issues the operation for all of them, on the communicator's
/// stream. Nothing is issued before all are there, so nothing on the device ever waits for what is not.
class Communicator final : public thread_group::Communicator {
 public:
  Communicator(std::string name, const c10::Device& device)
      : thread_group::Communicator(std::move(name)),
        stream_(device) {}

  /// What one rank leaves: tensors that nobody else's bookkeeping sees, and an event that is recorded after all that
  /// the operation is to start after.
  struct Arrival {
    thread_group::Part part;
    std::vector<at::Tensor> outputs;
    thread_group::Compute compute;
    c10::Event ready;
    std::shared_ptr<Call> call;
  };
  /// Never waits. Raises what is wrong if the last to come finds that the ranks call different things.
  void arrive(const thread_group::Place& place, Arrival arrival);

  /// Blocks the host until everything of the call is issued, at most until its deadline; then makes the current stream
  /// wait for its end. Raises an error once the communicator has failed.
  void wait(const Call& call);
  /// Whether it is at its end, or has failed.
  bool is_over(const Call& call);
  /// Until the stream has done what was issued so far.
  void synchronize() const {
    stream_.get().synchronize();
  }

  using thread_group::Communicator::failure;
  /// The same; a call that should have been issued by now is a failure.
  std::string failure(const Call& call);

 private:
  using Meeting = std::vector<std::unique_ptr<Arrival>>;

  // Under the mutex.
  /// Gives the calls that have come to their end with it.
  std::vector<std::shared_ptr<Call>> issue(const thread_group::Place& place, Meeting meeting);
  void fail_late(const Call& call);
  void set_failure(const std::string& reason) override;

  const thread_group::BorrowedStream stream_;
  std::map<std::pair<std::string, uint64_t>, Meeting> meetings_;
};

} // namespace stream_group
