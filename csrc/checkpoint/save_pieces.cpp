#include "checkpoint/save_pieces.h"

#include "base/compute_guard.h"
#include "files/saving.h"

#include <c10/util/StringUtil.h>

namespace shardwise::checkpoint {
namespace {

/// This rank's share of the checkpoint, and the memory that it is written from.
struct Share {
  std::vector<at::Tensor> memory;
  std::vector<files::TensorToWrite> tensors;
};

Share collect(const std::vector<Piece>& pieces, const std::vector<BoxOfPiece>& chosen) {
  const base::ComputeGuard guard;
  Share share;
  std::vector<at::Tensor> on_host(pieces.size());
  for (const auto& [index, number] : chosen) {
    const auto& piece = pieces[index];
    auto& values = on_host[index];
    if (!values.defined()) values = share.memory.emplace_back(piece.values.detach().to(at::kCPU).contiguous());
    int64_t first = 0;
    for (size_t k = 0; k < number; ++k) first += piece.boxes[k].numel();
    const bool is_empty = values.numel() == 0;
    auto box = is_empty ? files::Box::whole(piece.sizes) : piece.boxes[number];
    const auto bytes = static_cast<size_t>(box.numel()) * values.element_size();
    const auto* begin = static_cast<const std::byte*>(values.const_data_ptr());
    const files::Bytes data(begin + (is_empty ? 0 : first * values.element_size()), bytes);
    share.tensors.push_back({piece.name, values.scalar_type(), std::move(box), {data}});
  }
  return share;
}

/// What one rank wrote, for the rank that commits.
std::string text_of(std::vector<files::FileRecord> records) {
  files::Marker written;
  written.files = std::move(records);
  return files::marker_text(written);
}

} // namespace

void save_pieces(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about) {
  const auto label = c10::str("a checkpoint with the values ", files::json_text(about.values));
  const auto chosen = divide(ranks, pieces, label);
  files::Saving saving;
  const auto begin = [&]() -> std::string {
    if (!ranks.is_first()) return "";
    saving = files::begin_saving(disk, place);
    return files::name_of(saving.folder);
  };
  try {
    const auto folder = files::folder_of(place) + "/" + ranks.together(begin).front();
    const auto texts = ranks.together([&] {
      const auto share = collect(pieces, chosen);
      return text_of(files::write_shard(disk, folder, ranks.rank() + 1, share.tensors));
    });
    ranks.together([&] {
      if (!ranks.is_first()) return "";
      about.world = ranks.size();
      for (size_t rank = 0; rank < texts.size(); ++rank) {
        const auto written = files::parse_marker(texts[rank], c10::str("what rank ", rank, " wrote"));
        about.files.insert(about.files.end(), written.files.begin(), written.files.end());
      }
      files::commit_saving(disk, saving, about);
      return "";
    });
  } catch (...) {
    if (!saving.folder.empty()) files::abandon_saving(disk, saving);
    throw;
  }
}

} // namespace shardwise::checkpoint
