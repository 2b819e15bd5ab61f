#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <stdexcept>

/// What one rank says of one step.
struct Record {
  int64_t step;
  double loss;
  double tokens_per_second;
  double rss_mib;
  /// What torch holds of an accelerator's memory; 0 on a CPU.
  double device_mib;

  /// The memory that training fills: the accelerator's where there is one.
  double memory_mib() const {
    return device_mib > 0 ? device_mib : rss_mib;
  }
};

constexpr double mebibyte = 1024.0 * 1024.0;

/// The memory of this process that is really there, torch's own code included.
inline double resident_mib() {
  int64_t all = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return static_cast<double>(resident * sysconf(_SC_PAGESIZE)) / mebibyte;
}

inline double device_mib(torch::Device device) {
  if (device.is_cpu()) return 0;
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return static_cast<double>(stats.reserved_bytes.front().current) / mebibyte;
}

/// A file of records, one JSON object a line.
class Records {
 public:
  explicit Records(const std::filesystem::path& file) : file_(file) {
    if (!file_) throw std::runtime_error("gpt: cannot write " + file.string() + "; --out must be an existing folder.");
    file_ << std::setprecision(9);
  }

  void write(const Record& record) {
    file_ << "{\"step\": " << record.step << ", \"loss\": " << record.loss
          << ", \"tokens_per_second\": " << record.tokens_per_second << ", \"rss_mib\": " << record.rss_mib;
    if (record.device_mib > 0) file_ << ", \"device_mib\": " << record.device_mib;
    file_ << "}" << std::endl;
  }

 private:
  std::ofstream file_;
};
