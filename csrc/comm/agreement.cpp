#include "comm/agreement.h"

#include "comm/language_lock.h"
#include "comm/process_group.h"
#include "comm/reason.h"
#include "comm/rendezvous.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace shardwise::comm {
namespace {

constexpr auto kConnectTimeout = std::chrono::minutes(5);
constexpr auto kTimeout = std::chrono::minutes(10);

using Groups = std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>>;

/// The agreements of the process groups that are alive.
struct AgreementTable {
  struct Entry {
    Groups groups;
    std::shared_ptr<Agreement> agreement;

    bool expired() const {
      return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.expired(); });
    }
    bool is_of(const std::vector<Line>& lines) const {
      const auto same = [](const auto& a, const Line& b) { return a._unsafe_get_target() == b.group.get(); };
      return std::equal(groups.begin(), groups.end(), lines.begin(), lines.end(), same);
    }
  };
  std::mutex mutex;
  std::vector<Entry> entries;

  std::shared_ptr<Agreement> find(const std::vector<Line>& lines) {
    // Those of groups that are gone end after the lock, for closing connections takes its time.
    std::vector<std::shared_ptr<Agreement>> ended;
    const std::lock_guard lock(mutex);
    std::erase_if(entries, [&](const Entry& entry) {
      if (!entry.expired()) return false;
      ended.push_back(entry.agreement);
      return true;
    });
    for (const auto& entry : entries) {
      if (entry.is_of(lines)) return entry.agreement;
    }
    return nullptr;
  }

  static AgreementTable& get() {
    static auto* table = new AgreementTable;
    return *table;
  }
};

bool works(const Line& line) {
  const auto store = line.group->getStore();
  if (!store) return false;
  try {
    store->add("shardwise", 0);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

} // namespace

/// What a rank does, as it travels.
struct Agreement::Record {
  int64_t rank = 0;
  int64_t chain = 0;
  int64_t event = 0;
  std::array<int64_t, kChains> positions{};
  /// It did not come to issue this, but has issued it and waits.
  int64_t waits = 0;
  std::array<char, 456> text{};

  void write(const std::string& words) {
    words.copy(text.data(), text.size() - 1);
  }
};

/// What a rank that does not go on tells the others.
struct Agreement::Note {
  std::array<int64_t, kChains> positions{};
  /// What it waits for; of no chain when it compares, or goes on.
  int64_t chain = -1;
  int64_t number = 0;
  bool goes_on = false;

  /// Whether this rank will never issue what another one waits for, unless that one goes on first. Where it waits
  /// itself, that can be told if both wait for ranks of the line that they share.
  bool blocks(const Note& waiting, bool share_line) const {
    if (goes_on || positions[waiting.chain] > waiting.number) return false;
    return chain < 0 || (share_line && waiting.positions[chain] <= number);
  }
};

Agreement::Agreement(std::vector<Channel> channels) : channels_(std::move(channels)) {}

std::shared_ptr<Agreement> Agreement::of(const std::vector<Line>& all_lines) {
  auto lines = all_lines;
  std::erase_if(lines, [](const Line& line) { return line.group->getSize() == 1; });
  if (auto found = AgreementTable::get().find(lines)) return found;
  if (lines.empty() || !std::all_of(lines.begin(), lines.end(), works)) return nullptr;
  std::vector<Channel> channels;
  Groups groups;
  for (const auto& [group, ranks] : lines) {
    const auto purpose = c10::str("shardwise agreement of ", lines.size(), " axes");
    const auto store = c10::make_intrusive<c10d::PrefixStore>(purpose, group->getStore());
    const auto control = make_process_group(
        {.name = purpose,
         .store = store,
         .rank = group->getRank(),
         .size = group->getSize(),
         .device = at::kCPU,
         .connect_timeout = kConnectTimeout,
         .timeout = kTimeout,
         .transport = Transport::gloo});
    meet(*store, group->getRank(), group->getSize(), kConnectTimeout);
    // The back end itself: tools that count collectives are not to see these.
    channels.push_back({control->getBackend(c10::DeviceType::CPU), store, ranks});
    groups.emplace_back(group);
  }
  std::shared_ptr<Agreement> made(new Agreement(std::move(channels)));
  auto& table = AgreementTable::get();
  const std::lock_guard lock(table.mutex);
  table.entries.push_back({std::move(groups), made});
  return made;
}

void Agreement::forget(const c10d::ProcessGroup& group) {
  auto& table = AgreementTable::get();
  const std::lock_guard lock(table.mutex);
  std::erase_if(table.entries, [&](const AgreementTable::Entry& entry) {
    const auto is_it = [&](const auto& other) { return other._unsafe_get_target() == &group; };
    if (std::none_of(entry.groups.begin(), entry.groups.end(), is_it)) return false;
    entry.agreement->broken_ = "shardwise: the mesh of this unit was shut down; nothing can be sent any more.";
    for (auto& channel : entry.agreement->channels_) channel.control.reset();
    return true;
  });
}

int64_t Agreement::rank() const {
  const auto& channel = channels_.front();
  return channel.ranks[channel.control->getRank()];
}

Agreement::Place Agreement::enter(
    Chain chain, int64_t event, const std::function<std::string()>& describe, Counters& counters) {
  if (!broken_.empty()) throw Error(broken_);
  auto& way = ways_[chain];
  auto& next = way.next[way.last];
  if (next.size() != 1 || next.front() != event) {
    ++counters.comparisons;
    compare(chain, event, describe());
    if (std::find(next.begin(), next.end(), event) == next.end()) next.push_back(event);
  }
  way.last = event;
  return {shared_from_this(), chain, way.issued++};
}

Agreement::Place Agreement::pass(Chain chain) {
  if (!broken_.empty()) throw Error(broken_);
  return {shared_from_this(), chain, ways_[chain].issued++};
}

size_t Agreement::line_of(int64_t chain) const {
  return chain == first_axis ? 0 : channels_.size() - 1;
}

std::array<int64_t, Agreement::kChains> Agreement::positions() const {
  return {ways_[group].issued, ways_[second_group].issued, ways_[first_axis].issued};
}

std::string Agreement::note_of(int64_t rank) const {
  return c10::str("note ", compared_, " of rank ", rank);
}

void Agreement::leave(const Note& note) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&note);
  for (const auto& channel : channels_) {
    channel.notes->set(note_of(rank()), std::vector<uint8_t>(bytes, bytes + sizeof(Note)));
  }
  left_note_ = true;
}

// Not deleted: another rank may be about to read it.
void Agreement::stop_looking() {
  if (left_note_) leave({.goes_on = true});
}

void Agreement::compare(Chain chain, int64_t event, const std::string& text) {
  require_not_forked(forks_, "this unit");
  Record mine;
  mine.chain = chain;
  mine.event = event;
  mine.positions = positions();
  mine.write(text);
  leave({.positions = mine.positions});
  const auto records = exchange(mine);
  const bool same = std::all_of(records.begin(), records.end(), [&](const Record& record) {
    return record.chain == chain && record.event == event && record.waits == 0;
  });
  if (!same) raise(records);
  ++compared_;
}

// Along one axis after the other: each brings what the ones before have brought to the others.
std::vector<Agreement::Record> Agreement::exchange(Record mine) {
  mine.rank = rank();
  std::vector<Record> records{mine};
  const WithoutLanguageLock unlocked;
  for (const auto& channel : channels_) {
    const auto bytes = static_cast<int64_t>(records.size() * sizeof(Record));
    auto input = at::empty({bytes}, at::kByte);
    auto output = at::empty({channel.control->getSize() * bytes}, at::kByte);
    std::memcpy(input.data_ptr(), records.data(), bytes);
    try {
      channel.control->_allgather_base(output, input)->wait();
    } catch (const std::exception& error) {
      throw PeerError(c10::str(
          "shardwise: rank ", mine.rank, " compared with the other ranks what comes next, ", mine.text.data(),
          ", and one of them did not answer: it died (look for its own error first) or stopped to train. "
          "The reason given: ",
          reason(error)));
    }
    records.resize(records.size() * channel.control->getSize());
    std::memcpy(records.data(), output.data_ptr(), output.nbytes());
  }
  // All ranks are here, and none reads notes of this comparison any more.
  if (std::exchange(left_note_, false)) {
    for (const auto& channel : channels_) channel.notes->deleteKey(note_of(mine.rank));
  }
  std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return records;
}

void Agreement::raise(const std::vector<Record>& records) {
  const auto& first = records.front();
  const auto same = [&](const Record& record) {
    return record.waits == first.waits && std::strcmp(record.text.data(), first.text.data()) == 0;
  };
  size_t other = 0;
  bool under_way = false;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const auto& record = records[rank];
    // Who is about to start something has more to tell than who waits.
    if (!same(record) && (other == 0 || records[other].waits > record.waits)) other = rank;
    under_way = under_way || record.waits != 0 || record.positions != first.positions;
  }
  const auto does = [&](size_t rank) {
    return c10::str(
        "rank ", records[rank].rank, records[rank].waits != 0 ? " waits for " : " is about to start ",
        records[rank].text.data());
  };
  const auto text = c10::str(
      "shardwise: rank ", rank(), ": the ranks do not run the same units in the same order: ", does(0), ", but ",
      does(other),
      ". Every rank must run the same sharded units in the same order, forward and backward, with the same settings; "
      "what may differ are data, unused parameters of a unit, and how often a unit runs in a row.");
  ++compared_;
  for (auto& way : ways_) {
    way.last = -1;
    way.issued = 0;
  }
  if (under_way) broken_ = text + " Some of them wait for what will not come: start the program again.";
  throw Error(under_way ? broken_ : text);
}

void Agreement::look(Chain chain, int64_t number, const std::string& what) {
  if (!broken_.empty()) throw Error(broken_);
  const Note mine{.positions = positions(), .chain = chain, .number = number};
  leave(mine);
  for (size_t line = 0; line < channels_.size(); ++line) {
    const auto& channel = channels_[line];
    for (int position = 0; position < channel.control->getSize(); ++position) {
      const auto key = note_of(channel.ranks[position]);
      if (position == channel.control->getRank() || !channel.notes->check({key})) continue;
      Note note;
      const auto bytes = channel.notes->get(key);
      std::memcpy(&note, bytes.data(), std::min(bytes.size(), sizeof(Note)));
      if (!note.blocks(mine, line_of(chain) == line && line_of(note.chain) == line)) continue;
      leave({.positions = mine.positions});
      Record record;
      record.chain = chain;
      record.event = -1;
      record.positions = mine.positions;
      record.waits = 1;
      record.write(what);
      raise(exchange(record));
    }
  }
}

} // namespace shardwise::comm
