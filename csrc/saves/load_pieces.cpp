#include "saves/load_pieces.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <ATen/ops/empty.h>

namespace shardwise::saves {

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
  const auto& saved = folder.index().tensors.at(name);
  const auto memory = at::empty(saved.sizes, base::on_host(saved.dtype));
  return read_piece(folder, {name, saved.sizes, {files::Box::whole(saved.sizes)}, memory, false});
}

} // namespace shardwise::saves
