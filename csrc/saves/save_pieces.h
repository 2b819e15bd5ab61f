#pragma once

#include "files/marker.h"
#include "files/saving.h"
#include "saves/division.h"
#include "saves/snapshot.h"

#include <shardwise/export.h>

#include <string>
#include <vector>

namespace shardwise::saves {

/// A checkpoint of what all ranks have that is being saved to a place that all of them see: begun where nothing changes
/// the values, and finished on any thread. Unless it is finished, what was at the place stays, and nothing new does.
class SHARDWISE_API BegunSave {
 public:
  /// Agrees with the other ranks on who writes what, and makes the folder to write to. `about` has the program's values
  /// and the layout. With a snapshot the values may change from now on; else they are written from where they are.
  /// `division` may be that of another save, which remembers.
  /// Raises, the same on all ranks, what divide() and files::begin_saving() raise.
  BegunSave(
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

} // namespace shardwise::saves
