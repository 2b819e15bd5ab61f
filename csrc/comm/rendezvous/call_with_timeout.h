#pragma once

#include <shardwise/export.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace shardwise::comm {

namespace detail {
SHARDWISE_API void run_with_timeout(
    std::chrono::milliseconds limit, const std::function<void()>& look, std::function<void()> call);
} // namespace detail

/// Returns what `call` returns, and raises std::runtime_error if that takes longer than `limit` (and a few seconds'
/// grace). `call` runs on its own thread; meanwhile this one calls look(), which may raise, and does not hold the
/// caller's language lock. A thread that is left behind runs until the call returns, so `call` must own whatever it
/// uses.
template <typename Call>
auto call_with_timeout(std::chrono::milliseconds limit, const std::function<void()>& look, Call call) {
  using Result = decltype(call());
  const auto result = std::make_shared<std::optional<Result>>();
  detail::run_with_timeout(limit, look, [result, call = std::move(call)]() mutable { result->emplace(call()); });
  return std::move(**result);
}

} // namespace shardwise::comm
