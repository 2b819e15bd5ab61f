#include "saves/export.h"

#include "base/compute_guard.h"
#include "files/merge.h"
#include "saves/save.h"

#include <shardwise/save.h>

namespace shardwise {

void export_safetensors(const std::string& file, const torch::nn::Module& module) {
  constexpr const char* kFunction = "export_safetensors";
  nn::ModuleState state(module);
  const auto ranks = saves::ranks_of(state, std::nullopt, kFunction);
  const auto problem = state.locate();
  state.agree(kFunction, problem.empty() ? saves::reserved_name(state, kFunction) : problem);
  saves::check_export(ranks, file);
  const auto whole = full_state_dict(module, FullStateDictOptions().rank0_only(true).cpu_offload(true));
  saves::export_tensors(ranks, file, whole);
}

namespace saves {

void check_export(const Ranks& ranks, const std::string& file) {
  ranks.agree_on_place(file, "writes");
  ranks.together([&] {
    if (ranks.is_first()) files::check_file_place(files::Disk::real(), file);
    return "";
  });
}

void export_tensors(const Ranks& ranks, const std::string& file, const StateDict& whole) {
  ranks.together([&] {
    if (!ranks.is_first()) return "";
    const base::ComputeGuard guard;
    std::vector<at::Tensor> memory;
    std::vector<files::TensorToWrite> tensors;
    for (const auto& item : whole) {
      const auto& values = memory.emplace_back(item.value().detach().to(at::kCPU).contiguous());
      const files::Bytes data(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
      const auto box = files::Box::whole(values.sizes().vec());
      tensors.push_back({item.key(), values.scalar_type(), box, {data}});
    }
    files::write_whole_file(files::Disk::real(), file, tensors);
    return "";
  });
}

} // namespace saves
} // namespace shardwise
