#include "saves/load_pieces.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <optional>

namespace shardwise::saves {

files::SavedFolder open_checkpoint(const Ranks& ranks, const std::string& folder) {
  ranks.agree_on_place(folder, "loads");
  std::optional<files::SavedFolder> opened;
  const auto saves = ranks.together([&] {
    opened.emplace(files::Disk::real(), folder);
    const auto& marker = opened->index().marker;
    return marker ? marker->save : "";
  });
  for (size_t rank = 0; rank < saves.size(); ++rank) {
    if (saves[rank] == saves.front()) continue;
    throw Error(c10::str(
        "shardwise: rank ", rank, " finds another checkpoint at ", folder,
        " than rank 0: it was replaced by another save meanwhile, or the ranks do not see one folder. Load it again, "
        "from a folder that all ranks see."));
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
