#include "tensor_parallel/plan.h"

#include "nn/wrap/owners.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <unordered_map>

namespace shardwise::tensor_parallel {

namespace {

/// Whether a name fits a pattern, in which `*` stands for any text without a dot.
bool fits(std::string_view name, std::string_view pattern) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() != '*') {
    return !name.empty() && name.front() == pattern.front() && fits(name.substr(1), pattern.substr(1));
  }
  for (size_t taken = 0;; ++taken) {
    if (fits(name.substr(taken), pattern.substr(1))) return true;
    if (taken == name.size() || name[taken] == '.') return false;
  }
}

using Kind = Split::Kind;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::colwise:
      return "colwise()";
    case Kind::rowwise:
      return "rowwise()";
    case Kind::vocabulary:
      return "vocabulary()";
    default:
      return "sequence()";
  }
}

class Chooser {
 public:
  Chooser(const torch::nn::Module& module, const SplitPlan& plan, int64_t ranks)
      : tensors_(nn::walk(module)),
        plan_(plan),
        ranks_(ranks),
        used_(plan.size(), false) {
    for (auto& parameter : tensors_.parameters) {
      by_tensor_.emplace(parameter.tensor.unsafeGetTensorImpl(), &parameter);
    }
    visit(module, "");
    for (size_t i = 0; i < plan.size(); ++i) {
      if (used_[i]) continue;
      throw ValueError(c10::str(
          "shardwise: parallelize(): the pattern '", plan[i].first, "' fits no module and no parameter of this ",
          module.name(), ", or an earlier pattern took what it fits. Names look like '", example(), "'."));
    }
  }

  std::vector<Chosen> take() {
    return std::move(chosen_);
  }

 private:
  std::string example() const {
    return tensors_.parameters.empty() ? "layer.weight" : tensors_.parameters.front().names.front();
  }

  const Split* find(const std::string& name) {
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (!fits(name, plan_[i].first)) continue;
      used_[i] = true;
      return &plan_[i].second;
    }
    return nullptr;
  }

  void visit(const torch::nn::Module& module, const std::string& name) {
    const auto prefix = name.empty() ? "" : name + ".";
    const auto* of_module = find(name);
    if (of_module != nullptr) check_module(module, name, *of_module);
    for (const auto& item : nn::ModuleParts::of(module)) {
      if (!item.value().defined()) continue;
      const auto* of_parameter = find(prefix + item.key());
      const auto* split = of_parameter != nullptr ? of_parameter : of_module;
      if (split != nullptr) add(module, prefix + item.key(), item.value(), *split, of_parameter != nullptr);
    }
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key());
  }

  static void check_module(const torch::nn::Module& module, const std::string& name, const Split& split) {
    if (split.kind == Kind::sequence) return;
    const auto refuse = [&](const std::string& why) {
      throw ValueError(c10::str(
          "shardwise: parallelize(): '", name, "' is a ", module.name(), ", which ", name_of(split.kind), " ", why));
    };
    if (module.as<torch::nn::EmbeddingImpl>() != nullptr) {
      if (split.kind == Kind::rowwise) refuse("cannot divide. Use vocabulary(), or colwise().");
    } else if (module.as<torch::nn::MultiheadAttentionImpl>() != nullptr) {
      if (split.kind != Kind::colwise || !split.gather_output()) {
        refuse("cannot divide: it takes its sizes from its options. Use colwise().gather_output(true).");
      }
    } else if (module.name().starts_with("torch::nn::") && module.as<torch::nn::LinearImpl>() == nullptr) {
      refuse("cannot divide. Of torch's modules it can divide Linear, Embedding and MultiheadAttention.");
    }
  }

  /// The dimension of a parameter that the split divides, or -1.
  static int64_t dim_of(
      const torch::nn::Module& module, const std::string& name, const at::Tensor& tensor, const Split& split,
      bool is_named) {
    const auto refuse = [&](const std::string& why) {
      throw ValueError(c10::str(
          "shardwise: parallelize(): '", name, "', of sizes ", tensor.sizes(), ", cannot be divided by ",
          name_of(split.kind), ": ", why));
    };
    const bool is_attention = module.as<torch::nn::MultiheadAttentionImpl>() != nullptr;
    // bias_k and bias_v belong to what is computed with the gathered outputs.
    if (is_attention && tensor.dim() > 2) return -1;
    if (tensor.dim() == 0 || tensor.dim() > 2) refuse("it must be a matrix, or the bias of one.");
    if (tensor.dim() == 1) {
      if (split.kind == Kind::colwise) return 0;
      if (is_named) refuse("a bias of rowwise() stays whole, and is added once. Leave it out of the plan.");
      return -1;
    }
    if (split.kind == Kind::vocabulary) return 0;
    if (module.as<torch::nn::EmbeddingImpl>() != nullptr) return 1;
    return (split.kind == Kind::colwise) == split.transposed() ? 1 : 0;
  }

  layout::AxisPieces pieces_of(
      const torch::nn::Module& module, const std::string& name, int64_t size, Split split) const {
    // Where queries, keys and values are not the same, torch takes their weights out one by one.
    if (module.as<torch::nn::MultiheadAttentionImpl>() != nullptr && name.find("in_proj") != std::string::npos) {
      split.segments(3);
    }
    if (split.segments() < 1 || size % split.segments() != 0) {
      throw ValueError(c10::str(
          "shardwise: parallelize(): the ", size, " places of '", name, "' are not ", split.segments(),
          " segments of equal size."));
    }
    if (!split.heads()) return {size, ranks_, split.segments()};
    const auto heads = *split.heads();
    const auto segment = size / split.segments();
    if (heads < 1 || segment % heads != 0 || heads % ranks_ != 0) {
      throw ValueError(c10::str(
          "shardwise: parallelize(): '", name, "' has ", segment, " places", split.segments() > 1 ? " a segment" : "",
          " for ", heads, " heads, which cannot be divided among ", ranks_,
          " ranks: the number of heads must divide the places, and the axis the heads."));
    }
    return {size, ranks_, split.segments(), segment / heads};
  }

  void add(
      const torch::nn::Module& module, const std::string& name, const at::Tensor& tensor, const Split& split,
      bool is_named) {
    const auto& parameter = *by_tensor_.at(tensor.unsafeGetTensorImpl());
    if (split.kind == Kind::sequence) return merge(parameter, name, {parameter, -1, {0, ranks_}, {}, {}, true});
    const auto dim = dim_of(module, name, tensor, split, is_named);
    if (dim < 0) {
      // After a scattered sum each rank adds the bias to its part of the activations.
      if (split.sequence_dim()) merge(parameter, name, {parameter, -1, {0, ranks_}, {}, {}, true});
      return;
    }
    Chosen chosen{parameter, dim, pieces_of(module, name, tensor.size(dim), split), {}, {}};
    const bool is_table = split.kind == Kind::vocabulary || module.as<torch::nn::EmbeddingImpl>() != nullptr;
    (is_table ? chosen.table : chosen.matrix) = split;
    merge(parameter, name, std::move(chosen));
  }

  /// A parameter of several modules may be in the plan under each name, if all divide it in the same way.
  void merge(const engine::NamedTensor& parameter, const std::string& name, Chosen one) {
    const auto known = std::find_if(chosen_.begin(), chosen_.end(), [&](const Chosen& other) {
      return other.parameter.tensor.is_same(parameter.tensor);
    });
    if (known == chosen_.end()) return chosen_.push_back(std::move(one));
    if (known->dim != one.dim || !(known->pieces == one.pieces) || known->sums_gradient != one.sums_gradient) {
      throw ValueError(c10::str(
          "shardwise: parallelize(): '", known->parameter.names.front(), "' and '", name,
          "' are one parameter, but the plan divides them in different ways. Give both the same dimension, as "
          "vocabulary() and colwise() do."));
    }
    if (one.matrix) known->matrix = one.matrix;
    if (one.table) known->table = one.table;
  }

  nn::ModuleTensors tensors_;
  const SplitPlan& plan_;
  int64_t ranks_;
  std::vector<bool> used_;
  std::unordered_map<const at::TensorImpl*, const engine::NamedTensor*> by_tensor_;
  std::vector<Chosen> chosen_;
};

} // namespace

std::vector<Chosen> choose(const torch::nn::Module& module, const SplitPlan& plan, int64_t ranks) {
  return Chooser(module, plan, ranks).take();
}

} // namespace shardwise::tensor_parallel
