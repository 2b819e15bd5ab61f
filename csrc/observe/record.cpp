#include "observe/record.h"

#include "files/json.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <optional>
#include <utility>
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

/// Nanoseconds of one steady clock, offset to the system clock so that machines can be compared.
int64_t now() {
  using std::chrono::duration_cast;
  using std::chrono::nanoseconds;
  static const auto between =
      std::chrono::system_clock::now().time_since_epoch() - std::chrono::steady_clock::now().time_since_epoch();
  return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch() + between).count();
}

// One event at a time, since there may be millions.
std::string json_of(const std::vector<Event>& events) {
  std::string text;
  for (const auto& event : events) {
    const files::Json::Object object{{"kind", event.kind},   {"name", event.name}, {"rank", event.rank},
                                     {"begin", event.begin}, {"end", event.end},   {"bytes", event.bytes}};
    text += (text.empty() ? "" : ", ") + files::json_text(object);
  }
  return "[" + text + "]";
}

/// Never destroyed: threads may write as long as the process runs.
class Recorder {
 public:
  static Recorder& get() {
    static auto* recorder = new Recorder;
    return *recorder;
  }

  void start() {
    const std::lock_guard lock(mutex_);
    if (!of_program_) events_.clear();
    first_ = events_.size();
    is_recording = true;
  }
  std::string stop() {
    const std::lock_guard lock(mutex_);
    if (!first_) return "[]";
    const std::vector<Event> own(events_.begin() + static_cast<ptrdiff_t>(*std::exchange(first_, {})), events_.end());
    is_recording = of_program_;
    if (!of_program_) events_.clear();
    return json_of(own);
  }
  void write(Event event) {
    const std::lock_guard lock(mutex_);
    if (is_recording) events_.push_back(std::move(event));
  }

  // A forked child has a copy of its parent's recorder, and needs a file of its own.
  void open(const std::string& folder, int64_t rank) {
    const std::lock_guard lock(mutex_);
    if (process_ == getpid()) return;
    if (process_ != 0) events_.clear();
    if (first_) first_ = std::min(*first_, events_.size());
    file_ = make_record_file(folder, rank);
    if (process_ == 0) std::atexit([] { get().save(); });
    process_ = getpid();
    is_recording = of_program_ = true;
  }

 private:
  Recorder() = default;
  // Prints instead of raising: at exit nobody can catch an error.
  void save() {
    const std::lock_guard lock(mutex_);
    if (process_ != getpid()) return;
    try {
      std::ofstream stream(file_);
      stream.exceptions(std::ios::failbit | std::ios::badbit);
      stream << json_of(events_) << std::flush;
    } catch (const std::exception&) {
      std::cerr << "shardwise: the record could not be written to " << file_ << "\n";
    }
  }

  std::mutex mutex_;
  std::vector<Event> events_;
  /// The index of the first event since start(), until stop().
  std::optional<size_t> first_;
  /// Whether SHARDWISE_RECORD asks for a record of the whole program; start() and stop() then read the events between
  /// them.
  bool of_program_ = std::getenv(kFolder) != nullptr;
  /// The file of the whole program's record, and the process that made it.
  std::string file_;
  pid_t process_ = 0;
};

} // namespace

std::atomic<bool> is_recording = std::getenv(kFolder) != nullptr;

// The first process gets the plain name. Other containers or runs may have the same rank, and process numbers may
// repeat too.
std::string make_record_file(const std::string& folder, int64_t rank) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  for (int number = 1;; ++number) {
    const auto again = number == 1 ? "" : c10::str("-", number);
    const auto path = (std::filesystem::path(folder) / c10::str("shardwise-rank", rank, again, ".json")).string();
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0 && errno == EEXIST) continue;
    const bool written = file >= 0 && ::write(file, "[]", 2) == 2;
    const auto reason = failed ? failed.message() : std::string(std::strerror(errno));
    if (file >= 0) ::close(file);
    if (written) return path;
    throw Error(c10::str(
        "shardwise: rank ", rank, ": the record of this program cannot be written to ", path, ": ", reason,
        ". Set SHARDWISE_RECORD, or the folder of record(), to one that this process can create or write to."));
  }
}

void open_program_record(int64_t rank) {
  const auto* folder = std::getenv(kFolder);
  if (folder == nullptr) return;
  // The rank in the whole program; a mesh may have only some of its ranks.
  const auto* launched = std::getenv("RANK");
  Recorder::get().open(folder, launched != nullptr && *launched != '\0' ? std::strtoll(launched, nullptr, 10) : rank);
}

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
  Recorder::get().write({kind_, std::move(name_), rank_, bytes_, begin_, now()});
}

} // namespace shardwise::observe

namespace shardwise {

void start_record() {
  observe::Recorder::get().start();
}

std::string stop_record() {
  return observe::Recorder::get().stop();
}

} // namespace shardwise
