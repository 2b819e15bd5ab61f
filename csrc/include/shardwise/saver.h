#pragma once

#include <shardwise/save.h>

#include <memory>
#include <string>
#include <utility>

namespace shardwise {

/// Saves while training goes on: save() copies what this rank is to write to the host and returns, and a thread writes
/// it. The checkpoint is at its place once all ranks have written, in the meaning of save().
///
/// One save is under way at a time: the next one waits for it first, and raises what it raised. Its memory, as large as
/// what this rank writes, is kept for the next one. All ranks must make the same calls in the same order.
class SHARDWISE_API Saver {
 public:
  Saver();
  Saver(Saver&&) noexcept;
  Saver& operator=(Saver&&) noexcept;
  /// Waits for the save that is under way. An error that nobody saw goes to stderr, and the process then exits with 1
  /// where it would exit with 0.
  ~Saver();

  /// As shardwise::save(). Raises what that raises, as far as it is known before anything is written, and what the save
  /// before raised. Raises Error where the process groups of the module's mesh are the program's and have no store.
  void save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options = {});
  void save(
      const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
      const SaveOptions& options = {});
  /// The same for a module holder or a shared_ptr to a module.
  template <detail::HoldsModule Holder, typename... More>
  void save(const std::string& folder, const Holder& holder, More&&... more) {
    save(folder, static_cast<const torch::nn::Module&>(*holder), std::forward<More>(more)...);
  }

  /// Returns once the last checkpoint will survive a loss of power. Raises what the save raised, once.
  void wait();
  /// Whether one is under way, so that wait() would wait.
  bool is_saving() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace shardwise
