#include "saves/save_pieces.h"

#include "base/compute_guard.h"
#include "files/marker_values.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise::saves {
namespace {

/// The program's values, for ranks to compare.
std::string text_of(const files::Json::Object& values) {
  files::Json::Object told;
  for (const auto& [name, value] : values) told.push_back({name, files::json_of_value(value, name)});
  return files::json_text(told);
}

/// What one rank wrote, for the rank that commits.
std::string text_of(std::vector<files::FileRecord> records) {
  files::Marker written;
  written.files = std::move(records);
  return files::marker_text(written);
}

at::Tensor elements_of(const Piece& piece, const at::Tensor& values, size_t box) {
  int64_t first = 0;
  for (size_t k = 0; k < box; ++k) first += piece.boxes[k].numel();
  return values.narrow(0, first, piece.boxes[box].numel());
}

} // namespace

BegunSave::BegunSave(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about, Division& division, Snapshot* snapshot)
    : unfinished_(disk),
      about_(std::move(about)),
      snapshot_(snapshot) {
  const auto& chosen = division.among(ranks, pieces, [&] {
    return c10::str("a checkpoint with the values ", text_of(about_.values), " to ", files::without_slashes(place));
  });
  // Before there is anything to remove again.
  ranks.together([&] {
    collect(pieces, chosen);
    return "";
  });
  const auto names = ranks.together([&]() -> std::string {
    if (!ranks.is_first()) return "";
    unfinished_.saving = files::begin_saving(disk, place);
    return files::name_of(unfinished_.saving.folder);
  });
  folder_ = files::folder_of(place) + "/" + names.front();
}

BegunSave::Unfinished::~Unfinished() {
  if (!saving.folder.empty()) files::abandon_saving(disk, saving);
}

void BegunSave::collect(const std::vector<Piece>& pieces, const std::vector<BoxOfPiece>& chosen) {
  const base::ComputeGuard guard;
  std::vector<at::Tensor> in_a_row(pieces.size());
  for (const auto& [index, box] : chosen) {
    const auto& piece = pieces[index];
    auto& values = in_a_row[index];
    if (!values.defined()) values = piece.values.detach().reshape({-1});
    memory_.push_back(values.numel() == 0 ? values : elements_of(piece, values, box));
  }
  if (snapshot_ != nullptr) snapshot_->take(memory_);
  for (size_t i = 0; i < chosen.size(); ++i) {
    const auto& [index, box] = chosen[i];
    auto& values = memory_[i];
    values = values.to(at::kCPU).contiguous();
    const auto& piece = pieces[index];
    const files::Bytes data(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
    auto where = values.numel() == 0 ? files::Box::whole(piece.sizes) : piece.boxes[box];
    tensors_.push_back({piece.name, values.scalar_type(), std::move(where), {data}});
  }
}

void BegunSave::finish(const Ranks& ranks) {
  const auto texts = ranks.together([&] {
    if (snapshot_ != nullptr) snapshot_->wait();
    return text_of(files::write_shard(unfinished_.disk, folder_, ranks.rank() + 1, tensors_));
  });
  ranks.together([&] {
    if (!ranks.is_first()) return "";
    about_.world = ranks.size();
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      const auto written = files::parse_marker(texts[rank], c10::str("what rank ", rank, " wrote"));
      about_.files.insert(about_.files.end(), written.files.begin(), written.files.end());
    }
    files::commit_saving(unfinished_.disk, unfinished_.saving, about_);
    unfinished_.saving = {};
    return "";
  });
}

void save_pieces(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about) {
  Division division;
  BegunSave(ranks, disk, place, pieces, std::move(about), division).finish(ranks);
}

} // namespace shardwise::saves
