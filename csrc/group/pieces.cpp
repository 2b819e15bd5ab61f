#include "group/pieces.h"

namespace shardwise::group {

at::Tensor piece_of(const at::Tensor& whole, const layout::Cut& cut, int64_t rank) {
  return whole.reshape(cut.shape).narrow(cut.dim, cut.starts[rank], cut.length(rank));
}

at::Tensor piece_in(const at::Tensor& parts, const layout::Cut& cut, int64_t rank, int64_t start) {
  return parts.narrow(0, start + cut.offsets[rank], cut.piece_numel(rank)).view(cut.piece_sizes(rank));
}

} // namespace shardwise::group
