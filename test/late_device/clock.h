#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace late {

/// A point in the life of a stream: right after its operation number `count`.
struct Moment {
  size_t stream = 0;
  uint32_t count = 0;
};

/// What a stream, an event or the host knows to be finished: of each stream, the operations up to a number.
class Clock {
 public:
  bool covers(const Moment& moment) const {
    return moment.stream < counts_.size() && counts_[moment.stream] >= moment.count;
  }
  void join(const Clock& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (size_t k = 0; k < other.counts_.size(); ++k) counts_[k] = std::max(counts_[k], other.counts_[k]);
  }
  void cover(const Moment& moment) {
    if (counts_.size() <= moment.stream) counts_.resize(moment.stream + 1);
    counts_[moment.stream] = std::max(counts_[moment.stream], moment.count);
  }
  /// The next operation of a stream, which knows itself.
  Moment next(size_t stream) {
    if (counts_.size() <= stream) counts_.resize(stream + 1);
    return {stream, ++counts_[stream]};
  }

 private:
  std::vector<uint32_t> counts_;
};

} // namespace late
