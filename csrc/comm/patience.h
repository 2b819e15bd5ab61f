#pragma once

#include <shardwise/export.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace shardwise::comm {

namespace detail {
SHARDWISE_API void run_patiently(
    std::chrono::milliseconds limit, const std::function<void()>& look, std::function<void()> call);
} // namespace detail

/// What `call` gives, which may block: it runs on a thread of its own, so that this one waits no longer than `limit`,
/// and meanwhile looks around: look() may raise. The thread stays behind then, until the call comes back by itself, so
/// the call must own whatever it uses. Without the language's lock; raises std::runtime_error after the limit.
template <typename Call>
auto patiently(std::chrono::milliseconds limit, const std::function<void()>& look, Call call) {
  using Result = decltype(call());
  const auto result = std::make_shared<std::optional<Result>>();
  detail::run_patiently(limit, look, [result, call = std::move(call)]() mutable { result->emplace(call()); });
  return std::move(**result);
}

} // namespace shardwise::comm
