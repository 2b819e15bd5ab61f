#include "saves/pieces.h"

#include "base/compute_guard.h"
#include "base/on_host.h"
#include "layout/shards.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <optional>
#include <unordered_set>
#include <utility>

namespace shardwise::saves {
namespace {

at::Tensor elements_of(const Piece& piece, const at::Tensor& values, size_t box) {
  int64_t first = 0;
  for (size_t k = 0; k < box; ++k) first += piece.boxes[k].numel();
  return values.narrow(0, first, piece.boxes[box].numel());
}

} // namespace

void Snapshot::take(std::vector<at::Tensor>& values) {
  const base::ComputeGuard guard;
  int64_t bytes = 0;
  std::unordered_set<at::Device> devices;
  for (const auto& each : values) {
    bytes += static_cast<int64_t>(layout::aligned(each.nbytes()));
    if (!each.is_cpu()) devices.insert(each.device());
  }
  if (!memory_.defined() || memory_.numel() < bytes) {
    memory_ = at::Tensor();
    memory_ = at::empty({bytes}, base::on_host(at::kByte).pinned_memory(!devices.empty()));
  }
  int64_t begin = 0;
  std::vector<at::Tensor> copies;
  for (const auto& each : values) {
    const auto length = static_cast<int64_t>(each.nbytes());
    copies.push_back(memory_.narrow(0, begin, length).view(each.scalar_type()).view(each.sizes()));
    begin += static_cast<int64_t>(layout::aligned(each.nbytes()));
  }
  // The host writes first: it must not touch what a device may be writing.
  for (const bool is_host : {true, false}) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].is_cpu() == is_host) copies[i].copy_(values[i], /*non_blocking=*/true);
    }
  }
  values = std::move(copies);
  copied_.clear();
  for (const auto device : devices) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    copied_.emplace_back(device.type()).record(streams.getStream(device));
  }
}

// By a thread that has used no device: the first one would take memory for it.
void Snapshot::wait() {
  for (auto& event : copied_) {
    const c10::DeviceGuard on_its_device(event.device());
    event.synchronize();
  }
  copied_.clear();
}

SaveInProgress::SaveInProgress(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about, Division& division, Snapshot* snapshot)
    : unfinished_(disk),
      about_(std::move(about)),
      snapshot_(snapshot) {
  const auto& chosen = division.among(ranks, pieces, [&] {
    const auto values = files::json_text(files::json_of_values(about_.values));
    return c10::str("a checkpoint with the values ", values, " to ", files::without_slashes(place));
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

SaveInProgress::Unfinished::~Unfinished() {
  if (!saving.folder.empty()) files::abandon_saving(disk, saving);
}

void SaveInProgress::collect(const std::vector<Piece>& pieces, const std::vector<BoxOfPiece>& chosen) {
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

void SaveInProgress::finish(const Ranks& ranks) {
  const auto texts = ranks.together([&] {
    if (snapshot_ != nullptr) snapshot_->wait();
    // For the rank that commits.
    files::Marker written;
    written.files = files::write_shard(unfinished_.disk, folder_, ranks.rank() + 1, tensors_);
    return files::marker_text(written);
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
  SaveInProgress(ranks, disk, place, pieces, std::move(about), division).finish(ranks);
}

files::SavedFolder open_checkpoint(const Ranks& ranks, const std::string& folder, const std::string& entry) {
  ranks.agree_on_place(folder, "loads");
  std::optional<files::SavedFolder> opened;
  const auto saves = ranks.together([&] {
    opened.emplace(files::Disk::real(), folder, entry);
    const auto& marker = opened->index().marker;
    return marker ? marker->save : "";
  });
  for (size_t rank = 0; rank < saves.size(); ++rank) {
    if (saves[rank] == saves.front()) continue;
    throw Error(c10::str(
        "shardwise: rank ", rank, " finds another checkpoint at ", folder,
        " than rank 0: another save replaced it meanwhile, or the ranks do not share one folder. Load it again, from "
        "a folder that all ranks can reach."));
  }
  return std::move(*opened);
}

at::Tensor read_piece(files::SavedFolder& folder, const Piece& piece) {
  const base::ComputeGuard guard;
  const auto values = at::empty(piece.values.sizes(), base::on_host(piece.values.scalar_type()));
  auto* next = static_cast<std::byte*>(values.mutable_data_ptr());
  for (const auto& box : piece.boxes) {
    const auto bytes = static_cast<size_t>(box.numel()) * values.element_size();
    if (bytes > 0) folder.read(piece.name, box, {next, bytes});
    next += bytes;
  }
  return values;
}

at::Tensor read_whole(files::SavedFolder& folder, const std::string& name) {
  const auto& saved = folder.tensor(name);
  const auto memory = at::empty(saved.sizes, base::on_host(saved.dtype));
  return read_piece(folder, {name, saved.sizes, {files::Box::whole(saved.sizes)}, memory, false});
}

} // namespace shardwise::saves
