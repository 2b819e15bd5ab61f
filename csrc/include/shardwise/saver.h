#pragma once

#include <shardwise/save.h>

#include <memory>
#include <string>
#include <utility>

namespace shardwise {

/// Saves while training goes on: save() copies this rank's part to the host and returns, and a thread writes it. The
/// checkpoint is at its place, as save() promises it, once all ranks have written.
///
/// One save is under way at a time: the next one waits for it first, and raises its error. The next one also uses its
/// memory again, which is as large as this rank's part. All ranks must make the same calls in the same order.
class SHARDWISE_API AsyncSaver {
 public:
  AsyncSaver();
  /// Takes over the other one's save. The other one can then only be destroyed or assigned to.
  AsyncSaver(AsyncSaver&&) noexcept;
  /// The same, after it has waited for its own save as the destructor does.
  AsyncSaver& operator=(AsyncSaver&&) noexcept;
  /// Waits for the save that is under way. An error that no call raised goes to stderr, and the process exits with 1
  /// instead of 0.
  ~AsyncSaver();

  /// As shardwise::save(). Raises the errors of that call that it knows before it writes, and the error of the save
  /// before. Raises Error if the process groups of the module's mesh are the program's and have no store.
  void save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options = {});
  /// Saves the optimizer's state too, and the options of its groups.
  void save(
      const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
      const SaveOptions& options = {});
  /// The same for a module holder or a shared_ptr to a module.
  template <detail::HoldsModule Holder, typename... More>
  void save(const std::string& folder, const Holder& holder, More&&... more) {
    save(folder, static_cast<const torch::nn::Module&>(*holder), std::forward<More>(more)...);
  }

  /// Returns once the last checkpoint will survive a loss of power. Raises the error of the save, once.
  void wait();
  /// Whether one is under way, so that wait() would wait.
  bool is_saving() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace shardwise
