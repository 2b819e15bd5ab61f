#include "support/seconds.h"

#include <sys/resource.h>

#include <cstdlib>
#include <fstream>

namespace shardwise::test {
namespace {

double cpu_seconds() {
  double sum = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage used{};
    getrusage(who, &used);
    for (const timeval& part : {used.ru_utime, used.ru_stime}) {
      sum += static_cast<double>(part.tv_sec) + static_cast<double>(part.tv_usec) / 1e6;
    }
  }
  return sum;
}

} // namespace

void TestSeconds::begin() {
  began_ = std::chrono::steady_clock::now();
  cpu_before_ = cpu_seconds();
}

void TestSeconds::end(const std::string& title, const std::string& file) const {
  const char* path = std::getenv("SHARDWISE_TEST_SECONDS");
  if (path == nullptr) return;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  std::ofstream(path, std::ios::app) << title << '\t' << file << '\t' << took.count() << '\t'
                                     << cpu_seconds() - cpu_before_ << '\n';
}

} // namespace shardwise::test
