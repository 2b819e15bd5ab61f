#include "comm/agree/agreement.h"

#include "base/caller.h"
#include "base/compute_guard.h"
#include "base/ends_within.h"
#include "base/on_host.h"
#include "base/reason.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstring>

namespace shardwise::comm {

/// What a rank is doing, as sent in a comparison.
struct Agreement::Record {
  enum Waits : int64_t { no, in_order, on_its_own };

  int64_t rank = 0;
  int64_t chain = 0;
  int64_t event = 0;
  std::array<int64_t, kChains> positions{};
  /// Set if the rank is not about to issue this, but already waits for it: a collective of the order, or one of the
  /// program's own.
  Waits waits = no;
  std::array<char, 456> text{};

  void write(const std::string& words) {
    words.copy(text.data(), text.size() - 1);
  }
  bool matches(const Record& other) const {
    return chain == other.chain && event == other.event && waits == other.waits && (waits == no || text == other.text);
  }
};

/// What a rank that is held up tells the others. It is comparing, unless `chain`, `own_group` or `failed` is set.
struct Agreement::Note {
  /// The number of comparisons so far. A note from an earlier round is out of date.
  int64_t round = 0;
  std::array<int64_t, kChains> positions{};
  /// The chain of the collective that it waits for; -1 for none.
  int64_t chain = -1;
  /// That collective's number in its chain, or in the process group of the program's own call that the rank waits for.
  int64_t number = 0;
  uint64_t own_group = 0;
  /// Ranks diverged: ranks that wait must join the comparison.
  int64_t diverged = 0;
  /// 1 if the rank failed; then `text` says why.
  int64_t failed = 0;
  std::array<char, 1000> text{};

  bool compares() const {
    return chain < 0 && own_group == 0 && failed == 0;
  }
  /// Whether it waits for one of the program's own collectives that the reading rank has not issued.
  bool waits_for_reader() const {
    if (own_group == 0) return false;
    const auto made = transport::IssueCount::of(own_group);
    return made && *made < static_cast<uint64_t>(number);
  }
  /// Whether the rank that left this note cannot issue what the reader waits for until the reader itself goes on. If it
  /// waits too, that is known only when both wait for ranks of a line that they share.
  bool blocks(const Note& reader, bool share_line) const {
    if (reader.number == kUnnumbered || positions[reader.chain] > reader.number) return false;
    if (compares()) return true;
    if (!share_line) return false;
    return chain < 0 ? waits_for_reader() : reader.positions[chain] <= number;
  }

  void write(const std::string& words) {
    words.copy(text.data(), text.size() - 1);
  }
  Notes::Bytes bytes() const {
    const auto* first = reinterpret_cast<const uint8_t*>(this);
    return {first, first + sizeof(Note)};
  }
  static Note of(const Notes::Bytes& bytes) {
    Note note;
    std::memcpy(static_cast<void*>(&note), bytes.data(), std::min(bytes.size(), sizeof(Note)));
    return note;
  }
};

namespace {

using Clock = std::chrono::steady_clock;

std::string as_sentence(std::string text) {
  if (!text.ends_with('.')) text += '.';
  return text;
}

} // namespace

Agreement::Agreement(std::vector<Channel> channels, std::chrono::milliseconds timeout)
    : channels_(std::move(channels)),
      rank_(channels_.front().ranks[channels_.front().control->getRank()]),
      notes_([&] {
        std::vector<Notes::Board> boards;
        for (const auto& [control, store, ranks, processes] : channels_) {
          boards.push_back(note_board(store, "note", ranks, control->getRank(), control->getSize()));
        }
        return boards;
      }()),
      timeout_(timeout) {}

void Agreement::require_unbroken() const {
  if (broken_.empty()) return;
  if (by_peer_) throw PeerError(broken_);
  throw Error(broken_);
}

void Agreement::belong_to_this_thread() {
  if (thread_ == std::this_thread::get_id()) return;
  thread_ = std::this_thread::get_id();
  transport::WaitObserver::add_for_this_thread(weak_from_this());
}

Agreement::Position Agreement::enter(
    Chain chain, int64_t event, const std::function<std::string()>& describe, Counters& counters) {
  require_unbroken();
  belong_to_this_thread();
  auto& history = histories_[chain];
  auto& next = history.next[history.last];
  if (next.size() != 1 || next.front() != event) {
    ++counters.comparisons;
    compare(chain, event, describe());
    if (std::find(next.begin(), next.end(), event) == next.end()) next.push_back(event);
  }
  history.last = event;
  return {shared_from_this(), chain, history.issued++};
}

Agreement::Position Agreement::pass(Chain chain) {
  require_unbroken();
  return {shared_from_this(), chain, histories_[chain].issued++};
}

void Agreement::compare_now(int64_t event, const std::string& text, Counters& counters) {
  require_unbroken();
  belong_to_this_thread();
  ++counters.comparisons;
  compare(group, event, text);
}

size_t Agreement::line_of(int64_t chain) const {
  return chain == first_axis ? 0 : channels_.size() - 1;
}

std::array<int64_t, Agreement::kChains> Agreement::positions() const {
  return {histories_[group].issued, histories_[second_group].issued, histories_[first_axis].issued};
}

// The more ranks there are, the more rarely each asks for the notes of all.
std::vector<std::pair<size_t, Agreement::Note>> Agreement::exchange_notes(Note mine) {
  constexpr std::chrono::milliseconds kFirst{500};
  mine.round = compared_;
  mine.positions = positions();
  mine.diverged = diverged_ ? 1 : 0;
  const auto bytes = mine.bytes();
  const auto now = Clock::now();
  if (bytes != polling_.note) polling_ = {.note = bytes, .next = now, .pause = kFirst};
  if (now >= polling_.next) {
    int64_t ranks = 0;
    for (const auto& channel : channels_) ranks += channel.control->getSize();
    const auto rarest = std::chrono::milliseconds(std::max<int64_t>(2000, 20 * ranks));
    notes_.leave(bytes);
    polling_.next = now + polling_.pause;
    polling_.pause = std::min(2 * polling_.pause, rarest);
  }
  std::vector<std::pair<size_t, Note>> others;
  for (const auto& [board, note] : notes_.answers_to(bytes)) {
    others.emplace_back(board, Note::of(note));
    // A failure never goes out of date.
    const auto& theirs = others.back().second;
    if (theirs.round != compared_ && theirs.failed == 0) others.pop_back();
  }
  return others;
}

void Agreement::compare(Chain chain, int64_t event, const std::string& text) {
  base::require_not_forked(forks_, "this unit");
  Record mine;
  mine.chain = chain;
  mine.event = event;
  mine.positions = positions();
  mine.write(text);
  const auto records = exchange(mine);
  const bool same = std::all_of(
      records.begin(), records.end(), [&](const Record& record) { return record.matches(records.front()); });
  if (!same) raise(records);
  ++compared_;
  diverged_ = false;
}

// One axis after the other; along each axis ranks pass on what they have collected so far.
std::vector<Agreement::Record> Agreement::exchange(Record mine) {
  mine.rank = rank_;
  std::vector<Record> records{mine};
  const base::WithoutCallerLock unlocked;
  const base::ComputeGuard guard;
  for (size_t line = 0; line < channels_.size(); ++line) {
    auto& control = *channels_[line].control;
    const auto bytes = static_cast<int64_t>(records.size() * sizeof(Record));
    auto input = at::empty({bytes}, base::on_host(at::kByte));
    auto output = at::empty({control.getSize() * bytes}, base::on_host(at::kByte));
    std::memcpy(input.data_ptr(), records.data(), bytes);
    try {
      wait_in_exchange(*control._allgather_base(output, input), line, mine);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      const auto cause = first_cause(line, {});
      fail(c10::str(
          "shardwise: rank ", mine.rank, mine.waits == Record::no ? " is about to start " : " waits for ",
          mine.text.data(), ", and could not ask the other ranks what they do",
          cause.empty() ? c10::str(
                              ": one of them did not answer (the time limit is ", timeout_.count(),
                              " ms). Look for the error of another rank first; if there is none, a rank has stopped "
                              "training or is slower than the time limit.")
                        : ", because " + cause,
          " Details: ", base::reason(error)));
    }
    records.resize(records.size() * control.getSize());
    std::memcpy(records.data(), output.data_ptr(), output.nbytes());
  }
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return records;
}

void Agreement::wait_in_exchange(c10d::Work& work, size_t line, const Record& mine) {
  constexpr std::chrono::milliseconds kLook{200};
  const auto what = c10::str("the comparison of what comes next, ", mine.text.data(), ",");
  while (!base::ends_within(work, kLook)) {
    require_alive(line, what);
    for (const auto& [board, note] : exchange_notes({})) {
      require_no_failure(note, what);
      diverged_ = diverged_ || note.waits_for_reader();
    }
  }
  work.wait();
}

void Agreement::raise(const std::vector<Record>& records) {
  const auto& first = records.front();
  size_t other = 0;
  bool under_way = false;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const auto& record = records[rank];
    // A rank that is about to start something says more than one that waits.
    if (!record.matches(first) && (other == 0 || records[other].waits > record.waits)) other = rank;
    under_way = under_way || record.waits != Record::no || record.positions != first.positions;
  }
  const auto does = [&](size_t rank) {
    const auto& record = records[rank];
    return c10::str(
        "rank ", record.rank, record.waits == Record::no ? " is about to start " : " waits for ",
        record.waits == Record::on_its_own ? "the program's own " : "", record.text.data());
  };
  // Units of two models may have the same names.
  const bool namesakes =
      first.waits == Record::no && records[other].waits == Record::no && first.text == records[other].text;
  const auto text = c10::str(
      "shardwise: rank ", rank_, ": the ranks do not run the same units in the same order: ", does(0), ", but ",
      does(other),
      namesakes ? c10::str(
                      ", but of another unit of the same name, which was wrapped earlier or later (events ",
                      first.event, " and ", records[other].event, ")")
                : "",
      ". Every rank must run the same sharded units in the same order, forward and backward, with the same settings; "
      "what may differ are data, unused parameters of a unit, and how often a unit runs in a row. So all ranks must "
      "take part in an evaluation too.");
  ++compared_;
  diverged_ = false;
  for (auto& history : histories_) {
    history.last = -1;
    history.issued = 0;
  }
  if (!under_way) throw Error(text);
  broken_ =
      text +
      " Some ranks wait for collectives that will never come, so nothing can run on this mesh's process groups any "
      "more. Models on other process groups go on. Start the program again, or make new process groups and a new mesh, "
      "and wrap the model anew.";
  throw Error(broken_);
}

void Agreement::join(Record mine, const std::string& what) {
  diverged_ = true;
  mine.positions = positions();
  mine.write(what);
  raise(exchange(mine));
}

void Agreement::fail(const std::string& text) {
  if (broken_.empty()) {
    broken_ = text;
    by_peer_ = true;
    Note last{.failed = 1};
    last.write(text);
    exchange_notes(last);
    // Other ranks may wait for this one, although it waits for no rank any more.
    constexpr std::chrono::milliseconds kTell{500};
    notes_.flush(kTell);
    // Destroyed on threads of their own: a channel may have a collective in flight that no rank will join, and would
    // wait for it.
    for (auto& channel : channels_) {
      if (channel.control) std::thread([control = std::move(channel.control)]() mutable { control.reset(); }).detach();
    }
  }
  throw PeerError(text);
}

std::string Agreement::cause_of_failure(const Position& position) {
  if (!broken_.empty()) return "";
  return first_cause(line_of(position.chain), {.chain = position.chain, .number = position.number});
}

std::string Agreement::first_cause(size_t line, const Note& mine) {
  const auto who = channels_[line].processes.who_ended();
  if (!who.empty()) return as_sentence(who);
  const auto tell = [&] {
    polling_ = {};
    return exchange_notes(mine);
  };
  tell();
  notes_.flush(std::chrono::seconds(1));
  for (const auto& [board, note] : tell()) {
    if (note.failed != 0) return as_sentence(c10::str("another rank failed first: ", note.text.data()));
  }
  return "";
}

void Agreement::require_alive(size_t line, const std::string& what) {
  const auto& processes = channels_[line].processes;
  const auto ended = processes.ended();
  if (ended.empty()) return;
  // A rank that finished its program before this one may have sent all that this one waits for: allow time for it to
  // arrive.
  constexpr std::chrono::seconds kOnItsWay{2};
  const auto now = Clock::now();
  if (!ended_since_) ended_since_ = now;
  if (now - *ended_since_ < kOnItsWay) return;
  fail(
      c10::str("shardwise: rank ", rank_, ": ", what, " failed, because ", processes.how_it_ended(ended.front()), "."));
}

void Agreement::require_no_failure(const Note& note, const std::string& what) {
  if (note.failed == 0) return;
  fail(c10::str(
      "shardwise: rank ", rank_, ": ", what, " failed, because another rank failed first: ", note.text.data()));
}

void Agreement::check_peers(const Position& position, const std::string& what) {
  require_unbroken();
  const auto line = line_of(position.chain);
  require_alive(line, what);
  Note mine{.chain = position.chain, .number = position.number};
  for (const auto& [board, note] : exchange_notes(mine)) {
    require_no_failure(note, what);
    mine.positions = positions();
    if (!note.blocks(mine, line == board && (note.chain < 0 || line_of(note.chain) == line))) continue;
    join({.chain = position.chain, .event = -1, .waits = Record::in_order}, what);
  }
}

void Agreement::check_peers_alive(const std::string& what) {
  require_unbroken();
  for (size_t line = 0; line < channels_.size(); ++line) require_alive(line, what);
  for (const auto& [board, note] : exchange_notes({.chain = group, .number = kUnnumbered}))
    require_no_failure(note, what);
}

// Only a rank that waits for this one can know that this one waits in vain.
void Agreement::still_waiting(const transport::ProgramCall& call) {
  if (!broken_.empty() || thread_ != std::this_thread::get_id()) return;
  const Note mine{.number = static_cast<int64_t>(call.number), .own_group = call.group};
  for (const auto& [board, note] : exchange_notes(mine)) {
    if (note.diverged == 0) continue;
    join({.event = -1, .waits = Record::on_its_own}, call.what);
  }
}

} // namespace shardwise::comm
