// Operations of the late device beside the CPU's: the same values, sizes and types.
#include "late_test.h"

#include <functional>

namespace shardwise::test {
namespace {

namespace F = torch::nn::functional;
using Inputs = std::vector<at::Tensor>;

struct Case {
  const char* name;
  /// Gets x and y of 4 x 6, positive z, integers i below 4, a mask m.
  std::function<at::Tensor(const Inputs&)> run;
  /// For what torch computes in other ways on other devices.
  double tolerance = 0;
};

#define CASE(name, ...)                                                                            \
  Case {                                                                                           \
    name, [](const Inputs& all) -> at::Tensor {                                                    \
      [[maybe_unused]] const auto &x = all[0], &y = all[1], &z = all[2], &i = all[3], &m = all[4]; \
      return __VA_ARGS__;                                                                          \
    }                                                                                              \
  }
#define NEAR(name, ...)                  \
  [] {                                   \
    auto near = CASE(name, __VA_ARGS__); \
    near.tolerance = 1e-5;               \
    return near;                         \
  }()
#define UNARY(name) CASE(#name, at::name(z))
#define BINARY(name) CASE(#name, at::name(x, y))
#define IN_PLACE(name, ...) CASE(#name, x.clone().name(__VA_ARGS__))

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      UNARY(abs), UNARY(neg), UNARY(exp), UNARY(exp2), UNARY(expm1), UNARY(log), UNARY(log2), UNARY(log10), UNARY(log1p),
      UNARY(sqrt), UNARY(rsqrt), UNARY(square), UNARY(reciprocal), UNARY(sin), UNARY(cos), UNARY(tan), UNARY(sinh),
      UNARY(cosh), UNARY(tanh), UNARY(asinh), UNARY(atan), UNARY(sigmoid), UNARY(erf), UNARY(erfc), UNARY(lgamma),
      UNARY(digamma), UNARY(floor), UNARY(ceil), UNARY(round), UNARY(trunc), UNARY(frac), UNARY(sign), UNARY(signbit),
      UNARY(isnan), UNARY(isinf), UNARY(isfinite), UNARY(logical_not), UNARY(relu), UNARY(selu), UNARY(celu),
      UNARY(silu), UNARY(mish), UNARY(log_sigmoid), UNARY(hardtanh), UNARY(hardsigmoid), UNARY(hardswish), UNARY(elu),
      UNARY(leaky_relu), UNARY(softplus), UNARY(softshrink), UNARY(hardshrink), UNARY(gelu), UNARY(sum), UNARY(mean),
      UNARY(prod), UNARY(var), UNARY(std), UNARY(max), UNARY(min), UNARY(argmax), UNARY(argmin), UNARY(norm),
      UNARY(median), UNARY(count_nonzero), UNARY(t), UNARY(flatten), UNARY(triu), UNARY(tril), UNARY(diag),
      UNARY(diagonal), UNARY(nonzero), UNARY(zeros_like), UNARY(ones_like), UNARY(deg2rad), UNARY(positive),
      BINARY(add), BINARY(sub), BINARY(mul), BINARY(div), BINARY(maximum), BINARY(minimum), BINARY(fmax), BINARY(fmin),
      BINARY(atan2), BINARY(hypot), BINARY(logaddexp), BINARY(eq), BINARY(ne), BINARY(lt), BINARY(le), BINARY(gt),
      BINARY(ge), BINARY(fmod), BINARY(remainder), BINARY(floor_divide), BINARY(copysign), BINARY(logical_and),
      BINARY(logical_or), BINARY(logical_xor), BINARY(nextafter), BINARY(heaviside), BINARY(dist), BINARY(mse_loss),
      BINARY(l1_loss), BINARY(smooth_l1_loss), BINARY(huber_loss), BINARY(cosine_similarity),
      CASE("pow", at::pow(z, 1.5)), CASE("pow of tensors", at::pow(z, y)), CASE("number first", 2.0 - x),
      CASE("add with alpha", at::add(x, y, 3)), CASE("mul by a number", x * 2.5), CASE("div by a number", x / 3),
      CASE("rounded div", at::div(x, y, "floor")), CASE("integer and float", i + x.select(1, 0)),
      CASE("integer division", i / 3), CASE("0-dim of the CPU", x * at::scalar_tensor(2.5)),
      CASE("broadcast", x + y.select(0, 1)), CASE("lerp", at::lerp(x, y, 0.3)), CASE("addcmul", at::addcmul(x, y, z, 2)),
      CASE("addcdiv", at::addcdiv(x, y, z, 2)), CASE("where", at::where(m, x, y)),
      CASE("where a number", at::where(m, x, 7.0)), CASE("clamp", at::clamp(x, -0.5, 0.5)),
      CASE("clamp_min", at::clamp_min(x, 0.1)), CASE("threshold", at::threshold(x, 0.1, 20)),
      CASE("nan_to_num", at::nan_to_num(at::log(x))), CASE("xlogy", at::xlogy(z, z)),
      CASE("mm", at::mm(x, y.t())), CASE("matmul", at::matmul(x, y.t())), CASE("addmm", at::addmm(at::mm(x, y.t()), x, y.t())),
      CASE("bmm", at::bmm(x.view({2, 2, 6}), y.view({2, 6, 2}))), CASE("baddbmm", at::baddbmm(at::ones({2, 2, 2}, x.options()), x.view({2, 2, 6}), y.view({2, 6, 2}))),
      CASE("mv", at::mv(x, y.select(0, 0))), CASE("dot", at::dot(x.flatten(), y.flatten())), CASE("outer", at::outer(x.select(0, 0), y.select(0, 1))),
      CASE("einsum", at::einsum("ij,kj->ik", {x, y})), CASE("linear", F::linear(x, y)), CASE("linear with bias", F::linear(x, y, z.select(1, 0))),
      CASE("bilinear", at::bilinear(x, y, at::ones({3, 6, 6}, x.options()))),
      CASE("sum of a dim", at::sum(x, 1)), CASE("sum, kept", at::sum(x, {0}, true)), CASE("sum as double", at::sum(x, at::kDouble)),
      CASE("mean of a dim", at::mean(x, 0)), CASE("var of a dim", at::var(x, 1)), CASE("std of a dim", at::std(x, 0)),
      CASE("var_mean", std::get<1>(at::var_mean(x, 1))), CASE("max of a dim", std::get<0>(at::max(x, 1))),
      CASE("where the max is", std::get<1>(at::max(x, 1))), CASE("min of a dim", std::get<0>(at::min(x, 0))),
      CASE("amax", at::amax(x, {1})), CASE("amin", at::amin(x, {0, 1})), CASE("argmax of a dim", at::argmax(x, 1)),
      CASE("logsumexp", at::logsumexp(x, {1})), CASE("softmax", at::softmax(x, 1)), CASE("log_softmax", at::log_softmax(x, 0)),
      CASE("cumsum", at::cumsum(x, 1)), CASE("cumprod", at::cumprod(x, 0)), CASE("cummax", std::get<0>(at::cummax(x, 1))),
      CASE("any", at::any(m)), CASE("all of a dim", at::all(m, 1)), CASE("norm of a dim", at::norm(x, 2, 1)),
      CASE("vector norm", at::linalg_vector_norm(x, 3)), CASE("nansum", at::nansum(at::log(x))), CASE("kthvalue", std::get<0>(at::kthvalue(x, 2, 1))),
      CASE("sort", std::get<0>(at::sort(x, 1))), CASE("argsort", at::argsort(x, false, 1)), CASE("topk", std::get<0>(at::topk(x, 3, 1))),
      CASE("where topk is", std::get<1>(at::topk(x, 3, 1))), CASE("searchsorted", at::searchsorted(std::get<0>(at::sort(x, 1)), y)),
      CASE("unique", std::get<0>(at::_unique(i))), CASE("bincount", at::bincount(i)), CASE("masked_select", at::masked_select(x, m)),
      CASE("transpose", x.transpose(0, 1) + 1), CASE("contiguous", x.t().contiguous()), CASE("reshape", x.t().reshape({3, 8})),
      CASE("permute", x.view({2, 2, 6}).permute({2, 0, 1}) * 2), CASE("narrow", x.narrow(1, 2, 3) + y.narrow(1, 0, 3)),
      CASE("select", x.select(0, 2).clone()), CASE("slice", x.slice(1, 0, 6, 2) * 1), CASE("expand", y.select(0, 0).expand({4, 6}) * x),
      CASE("squeeze", x.unsqueeze(1).squeeze(1) + 0), CASE("unfold", x.unfold(1, 3, 2) + 1), CASE("as_strided", x.as_strided({3, 3}, {2, 1}, 1) + 1),
      CASE("view as integers", x.view(at::kInt).clone()), CASE("movedim", x.movedim(0, 1).contiguous()), CASE("diagonal, written", [&] { auto w = x.clone(); w.diagonal().fill_(7); return w; }()),
      CASE("split", at::split(x, 4, 1)[1] + 1), CASE("chunk", at::chunk(x, 3, 1)[2] * 2), CASE("unbind", at::unbind(x, 0)[3] * 2),
      CASE("cat", at::cat({x, y}, 1)), CASE("cat of a view", at::cat({x.t(), y.t()}, 0)), CASE("stack", at::stack({x, y}, 1)),
      CASE("hstack", at::hstack({x, y})), CASE("repeat", x.repeat({2, 3})), CASE("tile", at::tile(x, {2})), CASE("repeat_interleave", at::repeat_interleave(x, 2, 1)),
      CASE("flip", at::flip(x, {1})), CASE("roll", at::roll(x, 2, 1)), CASE("rot90", at::rot90(x)), CASE("pad", F::pad(x, F::PadFuncOptions({1, 2}))),
      CASE("constant_pad_nd", at::constant_pad_nd(x, {1, 1, 2, 0}, 3)), CASE("block_diag", at::block_diag({x, y})),
      CASE("gather", at::gather(x, 1, i.view({4, 1}))), CASE("scatter", at::scatter(x, 1, i.view({4, 1}), 9)), CASE("scatter_add", at::scatter_add(x, 1, i.view({4, 1}), y)),
      CASE("index_select", at::index_select(x, 0, i)), CASE("index", x.index({i})), CASE("index by a mask", x.index({m})), CASE("index_add", at::index_add(x, 0, i, y)),
      CASE("index_copy", at::index_copy(x, 0, at::arange(4, i.options()), y)), CASE("index_put", [&] { auto w = x.clone(); w.index_put_({i}, y); return w; }()),
      CASE("index_put, added", [&] { auto w = x.clone(); w.index_put_({i}, y, true); return w; }()), CASE("index_fill", at::index_fill(x, 0, i, 5)),
      CASE("take", at::take(x, i)), CASE("take_along_dim", at::take_along_dim(x, at::argsort(x, false, 1), 1)), CASE("masked_fill", at::masked_fill(x, m, 3)),
      CASE("masked_scatter", at::masked_scatter(x, m, y)), CASE("one_hot", F::one_hot(i, 5)), CASE("embedding", F::embedding(i, x)),
      CASE("embedding_bag", F::embedding_bag(i.view({2, 2}), x)), CASE("bucketize", at::bucketize(x, std::get<0>(at::sort(z.flatten())))),
      CASE("layer_norm", at::layer_norm(x, {6}, z.select(0, 0), y.select(0, 0))), CASE("group_norm", F::group_norm(x.view({2, 4, 3}), F::GroupNormFuncOptions(2))),
      CASE("batch_norm", at::batch_norm(x, z.select(0, 0), y.select(0, 0), {}, {}, true, 0.1, 1e-5, false)), CASE("instance_norm", F::instance_norm(x.view({2, 4, 3}))),
      CASE("batch_norm, evaluated", at::batch_norm(x, {}, {}, y.select(0, 0), z.select(0, 0), false, 0.1, 1e-5, false)), CASE("rms_norm", at::rms_norm(x, {6})),
      CASE("normalize", F::normalize(x)), CASE("glu", at::glu(x, 1)), CASE("prelu", at::prelu(x, z.select(0, 0))), CASE("gelu by tanh", at::gelu(x, "tanh")),
      CASE("cross_entropy", F::cross_entropy(x, i)), CASE("nll_loss", F::nll_loss(x, i)), CASE("binary_cross_entropy", F::binary_cross_entropy_with_logits(x, m.to(at::kFloat))),
      CASE("kl_div", F::kl_div(x, z)), CASE("poisson_nll_loss", F::poisson_nll_loss(x, z)), CASE("hinge", F::hinge_embedding_loss(x, at::sign(y))),
      CASE("triplet", F::triplet_margin_loss(x, y, z)), CASE("cosine_embedding_loss", F::cosine_embedding_loss(x, y, at::ones({4}, x.options()))),
      CASE("conv1d", F::conv1d(x.view({2, 2, 6}), y.view({4, 2, 3}))), CASE("conv2d", F::conv2d(x.view({1, 1, 4, 6}), y.view({2, 1, 3, 4}))),
      CASE("conv2d in groups", F::conv2d(x.view({1, 2, 3, 4}), y.view({12, 1, 1, 2}), F::Conv2dFuncOptions().groups(2))), CASE("conv3d", F::conv3d(x.view({1, 1, 2, 3, 4}), y.view({3, 1, 2, 2, 2}))),
      CASE("conv_transpose2d", F::conv_transpose2d(x.view({1, 2, 3, 4}), y.view({2, 3, 2, 2}))), CASE("max_pool2d", F::max_pool2d(x.view({1, 4, 6}), F::MaxPool2dFuncOptions(2))),
      CASE("avg_pool2d", F::avg_pool2d(x.view({1, 4, 6}), F::AvgPool2dFuncOptions(2))), CASE("adaptive_avg_pool2d", F::adaptive_avg_pool2d(x.view({1, 4, 6}), F::AdaptiveAvgPool2dFuncOptions(2))),
      CASE("adaptive_max_pool2d", F::adaptive_max_pool2d(x.view({1, 4, 6}), F::AdaptiveMaxPool2dFuncOptions(2))), CASE("max_pool1d", F::max_pool1d(x.view({1, 4, 6}), F::MaxPool1dFuncOptions(2))),
      CASE("interpolate", F::interpolate(x.view({1, 1, 4, 6}), F::InterpolateFuncOptions().size(std::vector<int64_t>{8, 9}).mode(torch::kNearest))),
      CASE("bilinear interpolate", F::interpolate(x.view({1, 1, 4, 6}), F::InterpolateFuncOptions().size(std::vector<int64_t>{8, 9}).mode(torch::kBilinear).align_corners(false))),
      CASE("pixel_shuffle", at::pixel_shuffle(x.view({1, 4, 2, 3}), 2)), CASE("grid_sample", F::grid_sample(x.view({1, 1, 4, 6}), at::zeros({1, 2, 2, 2}, x.options()))),
      CASE("fold", F::fold(x.view({4, 6}), F::FoldFuncOptions({3, 4}, {2, 2}))), CASE("unfold2d", F::unfold(x.view({1, 1, 4, 6}), F::UnfoldFuncOptions({2, 2}))),
      NEAR("attention", at::scaled_dot_product_attention(x.view({1, 2, 2, 6}), y.view({1, 2, 2, 6}), z.view({1, 2, 2, 6}))),
      NEAR("causal attention", at::scaled_dot_product_attention(x.view({1, 2, 2, 6}), y.view({1, 2, 2, 6}), z.view({1, 2, 2, 6}), {}, 0.0, true)),
      CASE("cdist", at::cdist(x, y)), CASE("cross", at::cross(x.view({8, 3}), y.view({8, 3}), 1)), CASE("trace", at::trace(x)), CASE("kron", at::kron(x, y)),
      CASE("det", at::linalg_det(at::mm(x, y.t()))), CASE("inverse", at::linalg_inv(at::mm(x, x.t()) + at::eye(4, x.options()))), CASE("matrix_power", at::matrix_power(at::mm(x, y.t()), 3)),
      CASE("cholesky", at::linalg_cholesky(at::mm(x, x.t()) + 4 * at::eye(4, x.options()))), CASE("solve", at::linalg_solve(at::mm(x, x.t()) + at::eye(4, x.options()), y)),
      CASE("arange", at::arange(3, 11, 2, x.options())), CASE("linspace", at::linspace(0, 1, 7, x.options())), CASE("eye", at::eye(3, 5, x.options())),
      CASE("full", at::full({2, 3}, 1.5, x.options())), CASE("zeros", at::zeros({2, 0, 3}, x.options())), CASE("scalar_tensor", at::scalar_tensor(4, x.options())),
      CASE("full_like", at::full_like(x, 8)), CASE("new_zeros", x.new_zeros({3}) + 1), CASE("tril_indices", at::tril_indices(3, 3, 0, i.options())),
      CASE("to double", x.to(at::kDouble)), CASE("to half", x.to(at::kHalf)), CASE("to bfloat16", x.to(at::kBFloat16)), CASE("to bool", x.to(at::kBool)), CASE("half arithmetic", x.to(at::kHalf) * 3),
      CASE("bfloat16 matmul", at::mm(x.to(at::kBFloat16), y.t().to(at::kBFloat16))), CASE("complex", at::real(at::complex(x, y) * at::complex(y, x))), CASE("view_as_real", at::view_as_real(at::complex(x, y))),
      CASE("bitwise_and", at::bitwise_and(i, 1)), CASE("bitwise_or", at::bitwise_or(i, 4)), CASE("shift", at::bitwise_left_shift(i, i)), CASE("bitwise_not", at::bitwise_not(m)),
      IN_PLACE(add_, y), IN_PLACE(sub_, y), IN_PLACE(mul_, y), IN_PLACE(div_, z), IN_PLACE(fill_, 3), IN_PLACE(zero_), IN_PLACE(copy_, y.select(0, 0)), IN_PLACE(clamp_, -1, 1), IN_PLACE(relu_),
      IN_PLACE(exp_), IN_PLACE(neg_), IN_PLACE(sigmoid_), IN_PLACE(tanh_), IN_PLACE(lerp_, y, 0.25), IN_PLACE(addcmul_, y, z), IN_PLACE(addcdiv_, y, z, -1), IN_PLACE(masked_fill_, m, 4), IN_PLACE(index_add_, 0, i, y),
      IN_PLACE(scatter_add_, 1, i.view({4, 1}), y), IN_PLACE(addmm_, at::mm(x, y.t()), z), IN_PLACE(t_), IN_PLACE(unsqueeze_, 0), IN_PLACE(resize_, {2, 3}), IN_PLACE(fill_diagonal_, 2), IN_PLACE(cumsum_, 1),
      CASE("out", [&] { auto out = at::empty({0}, x.options()); at::add_out(out, x, y); return out; }()), CASE("out into a view", [&] { auto out = at::zeros({4, 12}, x.options()); auto half = out.narrow(1, 3, 6); at::mul_out(half, x, y); return out; }()),
      CASE("mm out", [&] { auto out = at::empty({4, 4}, x.options()); at::mm_out(out, x, y.t()); return out; }()), CASE("cat out", [&] { auto out = at::empty({8, 6}, x.options()); at::cat_out(out, {x, y}); return out; }()),
      CASE("foreach", at::_foreach_add({x, y}, {z, x})[1]), CASE("foreach, in place", [&] { std::vector<at::Tensor> w{x.clone(), y.clone()}; at::_foreach_mul_(w, 3); at::_foreach_add_(w, {z, z}); return w[0] + w[1]; }()),
      CASE("foreach norm", at::_foreach_norm({x, y})[1]), CASE("storage, shared", [&] { auto w = x.clone(); auto v = at::empty({0}, x.options()); v.set_(w.storage(), 2, {2, 2}, {6, 1}); v.fill_(5); return w; }()),
      CASE("grown", [&] { auto w = x.clone(); w.resize_({40}); return w.narrow(0, 0, 24) + 0; }()), CASE("by value", at::full({2}, x.sum().item<double>(), x.options())),
      NEAR("lstm cell", std::get<1>(at::lstm_cell(x, {y, z}, at::ones({24, 6}, x.options()), at::ones({24, 6}, x.options())))),
  };
  return all;
}

Inputs inputs() {
  torch::manual_seed(1);
  auto x = at::randn({4, 6});
  return {x, at::randn({4, 6}), at::rand({4, 6}) + 0.1, at::randint(0, 4, {4}), x > 0};
}

} // namespace

TEST(LateOperations, GiveWhatTheCpuGives) {
  const auto here = inputs();
  Inputs there;
  for (const auto& input : here) there.push_back(input.to(late_device(1)));
  for (const auto& each : cases()) {
    SCOPED_TRACE(each.name);
    try {
      expect_same(each.run(there), each.run(here), each.name, each.tolerance);
    } catch (const std::exception& error) {
      ADD_FAILURE() << each.name << ": " << error.what();
    }
  }
  expect_no_fault();
  EXPECT_GT(cases().size(), 300U);
}

TEST(LateOperations, HaveTheGradientsOfTheCpu) {
  const auto here = inputs();
  for (const auto& each : cases()) {
    SCOPED_TRACE(each.name);
    const auto gradient = [&](const at::Device& device) {
      Inputs all;
      for (const auto& input : here) all.push_back(input.to(device));
      all[0] = all[0].detach().requires_grad_();
      const auto result = each.run(all);
      if (!result.requires_grad()) return at::Tensor();
      // Not the same weight for all, or softmax has no gradient.
      const auto weight = at::arange(1, result.numel() + 1, result.options().requires_grad(false)).view(result.sizes());
      return torch::autograd::grad({(result * weight).sum()}, {all[0]}, {}, {}, false, true)[0];
    };
    at::Tensor wanted;
    try {
      wanted = gradient(at::kCPU);
    } catch (const c10::Error&) {
      continue; // Torch has no derivative for it.
    }
    try {
      const auto got = gradient(late_device(2));
      ASSERT_EQ(got.defined(), wanted.defined());
      if (wanted.defined()) expect_same(got, wanted, each.name, 10 * each.tolerance);
    } catch (const std::exception& error) {
      ADD_FAILURE() << each.name << ": " << error.what();
    }
  }
  expect_no_fault();
}

} // namespace shardwise::test
