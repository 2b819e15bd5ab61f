#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>
#include <shardwise/mesh.h>
#include <shardwise/state_dict.h>

#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace shardwise {

/// A value that a program saves beside its model.
using SavedValue = std::variant<bool, int64_t, double, std::string>;
/// Such values by name.
using SavedValues = std::map<std::string, SavedValue>;

/// The options of save(). Everything has a default.
struct SHARDWISE_API SaveOptions {
  /// Numbers, texts and truth values of the program, such as its step; the same on all ranks.
  TORCH_ARG(SavedValues, values) = {};
  /// Tensors of the program. Several ranks that give one name must give the same tensor; a tensor of one rank's own,
  /// such as the state of its generator, needs a name of its own.
  TORCH_ARG(StateDict, tensors) = StateDict();
  /// The ranks that save together. Unset: those of the module's units; this rank alone saves a module without units.
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
};

/// Saves a model to a folder that all ranks can reach, each rank its part. Any number of ranks can load it, however
/// they divide it: see docs/checkpoints.md. Tensors are safetensors files as torch.distributed.checkpoint writes and
/// reads them. One rank writes a tensor that every rank has whole.
///
/// The checkpoint appears at `folder` in one step, when all of it will survive a loss of power, and replaces one that
/// was there. If the save fails on one rank it raises on all of them, and the previous checkpoint stays.
///
/// All ranks must call it for the same module, outside of a backward. Raises ValueError if the folder has anything but
/// a checkpoint, or for what cannot be saved; Error if the disk fails, or if ranks differ.
SHARDWISE_API void save(const std::string& folder, const torch::nn::Module& module, const SaveOptions& options = {});

/// Saves the optimizer's state too, and the options of its groups. For SGD, Adam, AdamW, Adagrad and RMSprop,
/// torch::optim's or ours.
SHARDWISE_API void save(
    const std::string& folder, const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const SaveOptions& options = {});

/// Saves while training goes on: save() copies this rank's part to the host and returns, and a thread writes it. The
/// checkpoint is at its place, as save() promises it, once all ranks have written.
///
/// One save is under way at a time: the next one waits for it first, and raises its error. The next one reuses its
/// memory, which is as large as this rank's part. All ranks must make the same calls in the same order.
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

  /// As shardwise::save(). Raises those of its errors that it finds before writing, and the previous save's error.
  /// Raises Error if the process groups of the module's mesh are the program's and have no store.
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

/// The options of load(). Everything has a default.
struct SHARDWISE_API LoadOptions {
  /// Whether names that only the model or only the checkpoint has are an Error. If not, they are returned.
  TORCH_ARG(bool, strict) = true;
  /// Whether another program's folder, which has no checksums, is loaded too, such as one of Hugging Face's. If not,
  /// it is an Error.
  TORCH_ARG(bool, allow_unverified) = true;
  /// The key of the model's state dict in a file of Python's torch.save() that has more, as in
  /// {"model": model.state_dict(), "epoch": 3}. Its numbers and texts become the values.
  TORCH_ARG(std::string, entry) = "";
  /// As for save().
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
};

/// What load() found beside the model.
struct SHARDWISE_API Loaded {
  /// The program's values, such as its step.
  SavedValues values;
  /// The program's tensors, whole and on the host.
  StateDict tensors;
  /// Names that only the module or the optimizer has.
  std::vector<std::string> missing;
  /// Names that only the checkpoint has.
  std::vector<std::string> unexpected;
  /// Whether another program wrote the folder, without checksums.
  bool unverified = false;
};

/// Loads a checkpoint of save() into a model's parameters and buffers, in place, whatever ranks wrote it; also one of
/// torch.distributed.checkpoint's HuggingFaceStorageWriter, or of Hugging Face's (safetensors or pytorch_model.bin).
/// Each rank reads only what it needs. Parameters, shards and the optimizer stay the same objects.
///
/// `folder` may also be one file: of safetensors, or of Python's torch.save(model.state_dict(), file).
///
/// The call checks names, sizes and dtypes before it changes anything, and verifies all that it reads of a checkpoint
/// of ours. If it fails on one rank it raises on all of them. If the error reports corrupt data, the model has a
/// mix of old and new values: load another checkpoint.
///
/// All ranks must call it for the same module, outside of a backward.
SHARDWISE_API Loaded load(const std::string& folder, torch::nn::Module& module, const LoadOptions& options = {});

/// Sets the optimizer's state too, and the options of its groups.
SHARDWISE_API Loaded load(
    const std::string& folder, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
    const LoadOptions& options = {});

/// Writes the parameters and buffers of a model, whole, to one safetensors file, under all their names, as Hugging
/// Face's libraries and others read it; load() takes the folder of a model.safetensors. Rank 0 needs memory for all of
/// it. For several files, call save() and run `python -m shardwise checkpoint FOLDER --merge NEW`.
///
/// The file appears in one step, when all of it will survive a loss of power, and replaces one that was there. All
/// ranks must call it for the same module, outside of a backward; this rank alone writes a module without units. Raises
/// ValueError if something other than a file is there, or for what cannot be saved; Error if the disk fails, or if
/// ranks name different files.
SHARDWISE_API void export_safetensors(const std::string& file, const torch::nn::Module& module);

// A folder with a checkpoint for each of some steps: ROOT/step-100, ROOT/step-200. Any rank may ask.

/// Where the checkpoint of a step belongs: for save().
SHARDWISE_API std::string step_folder(const std::string& root, int64_t step);

/// A complete checkpoint: for load().
struct SavedStep {
  /// Its number: 100 for ROOT/step-100.
  int64_t step = 0;
  /// The path of its folder, which may differ from step_folder()'s if a save was interrupted.
  std::string folder;
};
/// The complete checkpoint of the highest step. Nothing if the folder has none, or does not exist. All ranks get the
/// same answer as long as no save runs meanwhile.
SHARDWISE_API std::optional<SavedStep> newest_step(const std::string& root);

/// Removes all complete checkpoints but the `count` newest. For one rank, after save(). Returns the folders that
/// it removed. Raises ValueError for a count below 1.
SHARDWISE_API std::vector<std::string> keep_newest_steps(const std::string& root, int64_t count);

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder, typename... More>
void save(const std::string& folder, const Holder& holder, More&&... more) {
  save(folder, static_cast<const torch::nn::Module&>(*holder), std::forward<More>(more)...);
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
void export_safetensors(const std::string& file, const Holder& holder) {
  export_safetensors(file, static_cast<const torch::nn::Module&>(*holder));
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder, typename... More>
Loaded load(const std::string& folder, const Holder& holder, More&&... more) {
  return load(folder, detail::module_in(holder), std::forward<More>(more)...);
}

} // namespace shardwise
