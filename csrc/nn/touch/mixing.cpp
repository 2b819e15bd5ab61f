#include "nn/touch/mixing.h"

#include "nn/touch/touch.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace shardwise::nn {
namespace {

using Names = std::unordered_set<std::string_view>;

/// Operations that have a dimension and compute nothing across it.
bool has_harmless_dimension(std::string_view name) {
  static const auto* names =
      new Names{"cat", "concat", "concatenate", "stack", "size", "stride", "sym_size", "sym_stride"};
  return names->contains(name);
}

/// Operations without a dimension of their own: products, reductions of everything, and what depends on the place.
bool mixes_all(std::string_view name) {
  static const auto* names = new Names{
      "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "cdist", "chain_matmul", "cholesky",
      "cholesky_inverse", "cholesky_solve", "corrcoef", "cov", "det", "dot", "einsum", "geqrf", "ger", "inner",
      "inverse", "kron", "linear", "logdet", "matmul", "matrix_exp", "matrix_power", "mm", "mv", "orgqr", "outer",
      "pdist", "pinverse", "qr", "slogdet", "svd", "tensordot", "trace", "vdot",
      // reductions
      "dist", "max", "mean", "median", "min", "nanmedian", "norm", "nuclear_norm", "prod", "std", "std_mean", "sum",
      "var", "var_mean",
      // places
      "bincount", "diag", "diagflat", "eye", "fill_diagonal", "fliplr", "flipud", "histc", "masked_scatter", "msort",
      "put", "take", "tril", "triu", "unique_consecutive"};
  return names->contains(name) || name.starts_with("_unique") || name.starts_with("linalg_");
}

/// Whether it makes or shows a view, which has the elements where they were.
bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  const auto* alias = schema.returns().front().alias_info();
  return alias != nullptr && !alias->isWrite();
}

/// The dimensions that the caller names, or null where the operation has no such argument.
const c10::IValue* dimensions_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  for (const auto* name : {"dim", "dims"}) {
    if (const auto index = schema.argumentIndexWithName(name)) return &arguments[static_cast<size_t>(*index)];
  }
  return nullptr;
}

bool are_all(const c10::IValue& dimensions) {
  return !dimensions.isInt() && !(dimensions.isIntList() && !dimensions.toIntVector().empty());
}

/// Whether the cut dimension is among those that the caller names.
bool includes(const c10::IValue& dimensions, int64_t dim, std::optional<int64_t> cut) {
  if (are_all(dimensions)) return true;
  const auto is_cut = [&](int64_t named) {
    // torch explains a dimension that is not there.
    if (named < -dim || named >= dim) return false;
    return !cut || at::maybe_wrap_dim(named, dim) == *cut;
  };
  if (dimensions.isInt()) return is_cut(dimensions.toInt());
  const auto named = dimensions.toIntVector();
  return std::any_of(named.begin(), named.end(), is_cut);
}

/// Whether index() or index_put() finds elements by their numbers along the cut dimension. A mask has a flag for each.
bool picks_by_number(const c10::IValue& indices, std::optional<int64_t> cut) {
  const auto all = indices.toListRef();
  for (size_t i = 0; i < all.size(); ++i) {
    if (cut && static_cast<size_t>(*cut) != i) continue;
    if (!all[i].isTensor() || !all[i].toTensor().defined()) continue;
    if (at::isIntegralType(all[i].toTensor().scalar_type(), /*includeBool=*/false)) return true;
  }
  return false;
}

/// Whether each row of a product comes from the same row of the piece alone.
bool is_product_by_rows(
    std::string_view name, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& tensor, std::optional<int64_t> cut) {
  return (name == "mm" || name == "matmul" || name == "linear") && cut == 0 && tensor.dim() == 2 &&
         arguments[0].toTensor().is_same(tensor) && !has_touch_key(arguments[1].toTensor());
}

} // namespace

bool mixes_places(
    const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& tensor,
    std::optional<int64_t> dimension) {
  const auto& schema = operation.schema();
  std::string_view name = schema.name();
  if (!name.starts_with("aten::") || is_view(schema)) return false;
  name.remove_prefix(std::string_view("aten::").size());
  if (name.ends_with('_')) name.remove_suffix(1);
  if (has_harmless_dimension(name)) return false;
  if (name == "index" || name == "index_put") return picks_by_number(arguments[1], dimension);
  if (const auto* dimensions = dimensions_of(schema, arguments)) {
    const bool is_along = includes(*dimensions, tensor.dim(), dimension);
    // It is about what lies along the other dimensions.
    return name == "renorm" ? !dimension || !is_along : is_along;
  }
  // The greater of two is one of each element.
  if (schema.overload_name() == "other") return false;
  if (mixes_all(name)) return !is_product_by_rows(name, arguments, tensor, dimension);
  const auto reduction = schema.argumentIndexWithName("reduction");
  return reduction && arguments[static_cast<size_t>(*reduction)] == c10::IValue(int64_t{at::Reduction::Mean});
}

bool is_followed_by_autograd(const at::Tensor& tensor) {
  return c10::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
}

bool sums_all(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, int64_t dimensions) {
  const auto& name = operation.schema().name();
  if (name != "aten::sum" && name != "aten::nansum") return false;
  const auto* named = dimensions_of(operation.schema(), arguments);
  return named == nullptr || are_all(*named) || (named->isIntList() && std::ssize(named->toIntVector()) == dimensions);
}

} // namespace shardwise::nn
