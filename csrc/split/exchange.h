#pragma once

#include "split/split_parameter.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace shardwise::split {

/// What the ranks along an axis send each other for one parameter, without autograd. All ranks call the same functions
/// in the same order; `what` names one in errors.
class Exchange {
 public:
  explicit Exchange(std::shared_ptr<const SplitParameter> parameter) : parameter_(std::move(parameter)) {}

  /// Starts the sum over the ranks, which overwrites a contiguous tensor. Wait for the result.
  comm::Pending start_sum(const at::Tensor& tensor, const char* what) const;
  /// The sum over the ranks; may overwrite the tensor.
  at::Tensor sum(const at::Tensor& tensor, const char* what) const;
  /// This rank's part along `dim`, one of as many equal ones as there are ranks, of the sum over the ranks.
  at::Tensor scatter_sum(const at::Tensor& tensor, int64_t dim, const char* what) const;
  /// The same, returned at once.
  struct Scattering {
    /// Lives until it was waited for.
    at::Tensor input;
    at::Tensor output;
    int64_t dim;
    comm::Pending pending;
    at::Tensor wait();
  };
  Scattering start_scatter_sum(const at::Tensor& tensor, int64_t dim, const char* what) const;
  /// The parts of all ranks, one after the other along `dim`: all of equal size.
  at::Tensor gather(const at::Tensor& part, int64_t dim, const char* what) const;
  /// The whole, of which each rank has the pieces along `dim`.
  at::Tensor gather(const at::Tensor& piece, int64_t dim, const layout::AxisPieces& pieces, const char* what) const;
  /// This rank's pieces of a whole, along `dim`.
  at::Tensor own(const at::Tensor& whole, int64_t dim, const layout::AxisPieces& pieces) const;

  const SplitParameter& parameter() const {
    return *parameter_;
  }
  std::string name(const char* what) const;

 private:
  int64_t size() const {
    return parameter_->axis->ranks.size();
  }
  /// The same, made only when an error needs it.
  comm::CollectiveName lazy_name(const char* what) const;
  /// Rows of all ranks, as one tensor.
  at::Tensor gather_rows(const at::Tensor& rows, const char* what) const;
  void require_parts(const at::Tensor& whole, int64_t dim, const char* what) const;

  std::shared_ptr<const SplitParameter> parameter_;
};

/// The ranges of a whole that a piece consists of, one after the other along `dim`.
at::Tensor piece_of(const at::Tensor& whole, int64_t dim, const layout::AxisPieces& pieces, int64_t rank);

} // namespace shardwise::split
