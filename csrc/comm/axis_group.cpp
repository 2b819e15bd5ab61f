#include "comm/axis_group.h"

namespace shardwise::comm {

// The last axis varies fastest.
std::vector<AxisGroup> axis_groups_of(const Mesh& mesh) {
  std::vector<AxisGroup> lines(mesh.axes().size());
  int64_t stride = 1;
  for (size_t i = lines.size(); i-- > 0;) {
    const auto& [name, size] = mesh.axes()[i];
    lines[i] = {mesh.group(name), {.first = mesh.rank() - mesh.coordinate(name) * stride, .stride = stride}};
    stride *= size;
  }
  return lines;
}

} // namespace shardwise::comm
