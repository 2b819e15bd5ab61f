#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

/// What rank 0 shows of all ranks: a line that is drawn anew on a terminal, a line now and then elsewhere.
class Progress {
 public:
  Progress(std::string label, int64_t steps)
      : label_(std::move(label)),
        steps_(steps),
        terminal_(isatty(STDOUT_FILENO) != 0),
        begin_(std::chrono::steady_clock::now()) {}

  /// Whether there is something to show after this step. Depends on the step alone, so that ranks agree.
  bool due(int64_t step) const {
    const auto every = std::max<int64_t>(1, steps_ / 100);
    return step == 1 || step % every == 0 || step == steps_;
  }

  void show(int64_t step, double loss, double tokens_per_second, const std::vector<double>& memory_mib) {
    const auto twelfth = std::max<int64_t>(1, steps_ / 12);
    if (!terminal_ && step != 1 && step != steps_ && step / twelfth == shown_ / twelfth) return;
    shown_ = step;
    const auto numbers =
        text("  loss %.3f  %.0f tokens/s  ", loss, tokens_per_second) + memory(memory_mib) + "  " + time_left(step);
    const auto count = std::to_string(steps_);
    auto line =
        label_ + text(" %*lld/%s ", static_cast<int>(count.size()), static_cast<long long>(step), count.c_str());
    if (terminal_) line += bar(step, columns() - static_cast<int64_t>(line.size() + numbers.size()) - 1);
    line += numbers;
    std::printf(terminal_ ? "\r%s\x1b[K" : "%s\n", line.c_str());
    if (terminal_ && step == steps_) std::printf("\n");
    std::fflush(stdout);
  }

 private:
  template <typename... Values>
  static std::string text(const char* format, Values... values) {
    char buffer[160];
    std::snprintf(buffer, sizeof buffer, format, values...);
    return buffer;
  }

  /// Each rank's memory, or their range where there are many.
  static std::string memory(const std::vector<double>& mib) {
    std::string result;
    if (mib.size() <= 4) {
      for (const auto value : mib) result += text(result.empty() ? "%.0f" : " | %.0f", value);
    } else {
      const auto [least, most] = std::minmax_element(mib.begin(), mib.end());
      result = text("%zu x %.0f-%.0f", mib.size(), *least, *most);
    }
    return result + " MiB";
  }

  std::string time_left(int64_t step) const {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
    if (step == steps_) return text("%.0f s in all", passed.count());
    return text("%.0f s left", passed.count() / static_cast<double>(step) * static_cast<double>(steps_ - step));
  }

  std::string bar(int64_t step, int64_t room) const {
    const auto width = std::clamp<int64_t>(room, 0, 40);
    const auto filled = width * step / steps_;
    std::string result;
    for (int64_t i = 0; i < width; ++i) result += unicode() ? (i < filled ? "━" : "─") : (i < filled ? "#" : ".");
    return result;
  }

  static int64_t columns() {
    winsize size{};
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  }

  static bool unicode() {
    for (const auto* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
      const char* value = std::getenv(name);
      if (value != nullptr && *value != '\0') return std::string(value).find("UTF-8") != std::string::npos;
    }
    return false;
  }

  std::string label_;
  int64_t steps_;
  bool terminal_;
  int64_t shown_ = 0;
  std::chrono::steady_clock::time_point begin_;
};
