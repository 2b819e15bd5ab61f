#pragma once

#include "files/marker.h"
#include "files/saved_folder.h"
#include "files/saving.h"
#include "saves/division.h"
#include "saves/ranks.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <string>
#include <vector>

namespace shardwise::saves {

/// Copies of values on the host, so that the values may change before the copies are written. The next copies use its
/// memory again. The memory is pinned if values are on a device.
class SHARDWISE_API Snapshot {
 public:
  /// Copies each of these. What is issued on a device later comes after its copies; the host does not wait. The copies
  /// before are of no use any more.
  void take(std::vector<at::Tensor>& values);
  /// The host waits until the copies are there.
  void wait();

 private:
  at::Tensor memory_;
  std::vector<c10::Event> copied_;
};

/// A save by all ranks, to a place that all of them can reach. It is begun while nothing changes the values, and
/// finished on any thread. Unless it is finished, the place stays as it was.
class SHARDWISE_API SaveInProgress {
 public:
  /// Agrees with the other ranks on who writes what, and makes the folder to write to. `about` has the program's values
  /// and the layout. With a snapshot the values may change from now on; otherwise their own memory is written.
  /// `division` may come from an earlier save, whose division it remembers.
  /// Raises, the same on all ranks, what Division::among() and files::begin_saving() raise.
  SaveInProgress(
      const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
      files::Marker about, Division& division, Snapshot* snapshot = nullptr);
  /// Writes this rank's share, and returns when the checkpoint of all ranks will survive a loss of power. `ranks` are
  /// the same, but may talk in another way.
  /// Raises, on all ranks, what files/saving.h raises.
  void finish(const Ranks& ranks);

 private:
  void collect(const std::vector<Piece>& pieces, const std::vector<BoxOfPiece>& chosen);

  /// What is written beside the place, on the rank that begins and commits it: removed unless it was committed.
  struct Unfinished {
    explicit Unfinished(files::Disk& on) : disk(on) {}
    Unfinished(const Unfinished&) = delete;
    Unfinished& operator=(const Unfinished&) = delete;
    ~Unfinished();

    files::Disk& disk;
    files::Saving saving;
  };

  Unfinished unfinished_;
  files::Marker about_;
  Snapshot* snapshot_;
  std::string folder_;
  /// This rank's share, and the memory that it is written from.
  std::vector<files::TensorToWrite> tensors_;
  std::vector<at::Tensor> memory_;
};

/// Begins a save and finishes it.
SHARDWISE_API void save_pieces(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about);

/// Opens a checkpoint on all ranks, which must name the same folder and find what the same save wrote.
/// Raises, on all ranks, Error if they do not, and what files::SavedFolder raises.
SHARDWISE_API files::SavedFolder open_checkpoint(
    const Ranks& ranks, const std::string& folder, const std::string& entry = "");

/// This rank's part of a tensor, as the checkpoint has it: new memory on the host, in the sizes of `piece.values`,
/// which stays as it is. Reads only the bytes that it needs. Raises the errors of files::SavedFolder::read().
SHARDWISE_API at::Tensor read_piece(files::SavedFolder& folder, const Piece& piece);

/// All of a tensor.
SHARDWISE_API at::Tensor read_whole(files::SavedFolder& folder, const std::string& name);

} // namespace shardwise::saves
