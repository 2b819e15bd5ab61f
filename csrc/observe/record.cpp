#include "observe/record.h"

#include "observe/text.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <vector>

namespace shardwise::observe {
namespace {

constexpr const char* kFolder = "SHARDWISE_RECORD";

struct Event {
  const char* kind;
  std::string name;
  int64_t rank;
  int64_t bytes;
  int64_t begin;
  int64_t end;
};

/// Steps of one clock, counted from a time that other machines know, too.
int64_t now() {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  static const auto between =
      std::chrono::system_clock::now().time_since_epoch() - std::chrono::steady_clock::now().time_since_epoch();
  return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch() + between).count();
}

std::string json_of(const Event& event) {
  return Object()
      .text("kind", event.kind)
      .text("name", event.name)
      .number("rank", event.rank)
      .number("begin", event.begin)
      .number("end", event.end)
      .number("bytes", event.bytes)
      .str();
}

/// Never destroyed: threads may write as long as the process runs.
class Book {
 public:
  static Book& get() {
    static auto* book = new Book;
    return *book;
  }
  Book(const Book&) = delete;
  Book& operator=(const Book&) = delete;

  void start() {
    const std::lock_guard lock(mutex_);
    events_.clear();
    is_recording = true;
  }
  std::string stop() {
    const std::lock_guard lock(mutex_);
    is_recording = false;
    auto text = list(events_, json_of);
    events_.clear();
    return text;
  }
  void write(Event event) {
    const std::lock_guard lock(mutex_);
    if (is_recording) events_.push_back(std::move(event));
  }

 private:
  Book() {
    if (std::getenv(kFolder) != nullptr) std::atexit([] { get().save(); });
  }
  void save() {
    const auto* folder = std::getenv(kFolder);
    if (folder == nullptr || !is_recording) return;
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    std::ofstream(std::filesystem::path(folder) / ("shardwise-" + std::to_string(getpid()) + ".json")) << stop();
  }

  std::mutex mutex_;
  std::vector<Event> events_;
};

} // namespace

std::atomic<bool> is_recording = std::getenv(kFolder) != nullptr;

Span::Span(const char* kind, std::string name, int64_t rank, int64_t bytes)
    : kind_(kind),
      name_(std::move(name)),
      rank_(rank),
      bytes_(bytes),
      begin_(now()) {}

Span::~Span() {
  end();
}

void Span::end() {
  if (ended_.exchange(true)) return;
  Book::get().write({kind_, std::move(name_), rank_, bytes_, begin_, now()});
}

} // namespace shardwise::observe

namespace shardwise {

void start_record() {
  observe::Book::get().start();
}

std::string stop_record() {
  return observe::Book::get().stop();
}

} // namespace shardwise
