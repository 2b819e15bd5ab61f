#include "comm/mesh/axis_group.h"

#include <utility>

namespace shardwise::comm {

AxisGroup axis_group_of(const Mesh& mesh, const std::string& axis) {
  mesh.coordinate(axis); // Raises for an axis that is not there.
  auto lines = axis_groups_of(mesh);
  size_t index = 0;
  while (mesh.axes()[index].name != axis) ++index;
  return std::move(lines[index]);
}

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
