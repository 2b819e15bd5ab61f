#pragma once

#include "comm/mesh/process_group.h"

namespace shardwise::cuda {

c10::intrusive_ptr<c10d::Backend> make_nccl(const comm::GroupSpec& spec);

} // namespace shardwise::cuda
