#include "comm/line.h"

namespace shardwise::comm {

// The last axis varies fastest.
std::vector<Line> lines_of(const Mesh& mesh) {
  std::vector<Line> lines(mesh.axes().size());
  int64_t stride = 1;
  for (size_t i = lines.size(); i-- > 0;) {
    const auto& [name, size] = mesh.axes()[i];
    lines[i] = {mesh.group(name), {.first = mesh.rank() - mesh.coordinate(name) * stride, .stride = stride}};
    stride *= size;
  }
  return lines;
}

} // namespace shardwise::comm
