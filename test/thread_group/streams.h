#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace thread_group {

/// A stream that nobody else here has as long as this lives; it goes to the next one then. (CUDA has 32 of them for
/// each device and begins anew after that, which orders more than was asked for, but never less.)
class BorrowedStream {
 public:
  explicit BorrowedStream(const c10::Device& device);
  ~BorrowedStream();
  BorrowedStream(const BorrowedStream&) = delete;
  BorrowedStream& operator=(const BorrowedStream&) = delete;

  const c10::Stream& get() const {
    return stream_;
  }

 private:
  const c10::Stream stream_;
};

} // namespace thread_group
