#include "comm/agreement.h"

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

/// The agreements of the process groups that are alive.
struct Table {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<Agreement> agreement;
  };
  std::mutex mutex;
  std::unordered_map<const c10d::ProcessGroup*, Entry> entries;

  std::shared_ptr<Agreement> find(const c10d::ProcessGroup* group) {
    // Those of groups that are gone end after the lock, for closing connections takes its time.
    std::vector<std::shared_ptr<Agreement>> ended;
    const std::lock_guard lock(mutex);
    std::erase_if(entries, [&](const auto& entry) {
      if (!entry.second.group.expired()) return false;
      ended.push_back(entry.second.agreement);
      return true;
    });
    const auto found = entries.find(group);
    return found == entries.end() ? nullptr : found->second.agreement;
  }

  static Table& get() {
    static auto* table = new Table;
    return *table;
  }
};

bool works(const c10::intrusive_ptr<c10d::Store>& store) {
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
  int64_t chain = 0;
  int64_t event = 0;
  std::array<int64_t, kChains> positions{};
  /// It did not come to issue this, but has issued it and waits.
  int64_t waits = 0;
  std::array<char, 472> text{};

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

  /// Whether this rank will never issue what another one, `place` on `chain`, waits for, unless that one goes on first.
  bool blocks(const Note& waiting) const {
    if (goes_on || positions[waiting.chain] > waiting.number) return false;
    return chain < 0 || waiting.positions[chain] <= number;
  }
};

Agreement::Agreement(c10::intrusive_ptr<c10d::Backend> control, c10::intrusive_ptr<c10d::Store> notes)
    : control_(std::move(control)),
      notes_(std::move(notes)) {}

std::shared_ptr<Agreement> Agreement::of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (auto found = Table::get().find(group.get())) return found;
  if (group->getSize() == 1 || !works(group->getStore())) return nullptr;
  const auto store = c10::make_intrusive<c10d::PrefixStore>("shardwise agreement", group->getStore());
  const auto control = make_process_group(
      {.name = "shardwise agreement",
       .store = store,
       .rank = group->getRank(),
       .size = group->getSize(),
       .device = at::kCPU,
       .connect_timeout = kConnectTimeout,
       .timeout = kTimeout});
  meet(*store, group->getRank(), group->getSize(), kConnectTimeout);
  // The back end itself: tools that count collectives are not to see these.
  std::shared_ptr<Agreement> made(new Agreement(control->getBackend(c10::DeviceType::CPU), store));
  auto& table = Table::get();
  const std::lock_guard lock(table.mutex);
  table.entries.insert_or_assign(group.get(), Table::Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made});
  return made;
}

void Agreement::forget(const c10d::ProcessGroup& group) {
  auto& table = Table::get();
  const std::lock_guard lock(table.mutex);
  const auto entry = table.entries.find(&group);
  if (entry == table.entries.end()) return;
  entry->second.agreement->broken_ = "shardwise: the mesh of this unit was shut down; nothing can be sent any more.";
  entry->second.agreement->control_.reset();
  table.entries.erase(entry);
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

std::array<int64_t, Agreement::kChains> Agreement::positions() const {
  return {ways_[group].issued, ways_[second_group].issued};
}

std::string Agreement::note_of(int rank) const {
  return c10::str("note ", compared_, " of rank ", rank);
}

void Agreement::leave(const Note& note) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&note);
  notes_->set(note_of(control_->getRank()), std::vector<uint8_t>(bytes, bytes + sizeof(Note)));
  left_note_ = true;
}

// Not deleted: another rank may be about to read it.
void Agreement::stop_looking() {
  if (left_note_) leave({.goes_on = true});
}

void Agreement::compare(Chain chain, int64_t event, const std::string& text) {
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

std::vector<Agreement::Record> Agreement::exchange(Record mine) {
  const auto size = static_cast<int64_t>(sizeof(Record));
  auto input = at::empty({size}, at::kByte);
  auto output = at::empty({control_->getSize() * size}, at::kByte);
  std::memcpy(input.data_ptr(), &mine, sizeof(Record));
  try {
    control_->_allgather_base(output, input)->wait();
  } catch (const std::exception& error) {
    throw PeerError(c10::str(
        "shardwise: rank ", control_->getRank(), " compared with the other ranks what comes next, ", mine.text.data(),
        ", and one of them did not answer: it died (look for its own error first) or stopped to train. "
        "The reason given: ",
        reason(error)));
  }
  // All ranks are here, and none reads notes of this comparison any more.
  if (std::exchange(left_note_, false)) notes_->deleteKey(note_of(control_->getRank()));
  std::vector<Record> records(control_->getSize());
  std::memcpy(records.data(), output.data_ptr(), records.size() * sizeof(Record));
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
    if (other == 0 && !same(record)) other = rank;
    under_way = under_way || record.waits != 0 || record.positions != first.positions;
  }
  const auto does = [&](size_t rank) {
    return c10::str(
        "rank ", rank, records[rank].waits != 0 ? " waits for " : " is about to start ", records[rank].text.data());
  };
  const auto text = c10::str(
      "shardwise: rank ", control_->getRank(), ": the ranks do not run the same units in the same order: ", does(0),
      ", but ", does(other),
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
  for (int rank = 0; rank < control_->getSize(); ++rank) {
    if (rank == control_->getRank() || !notes_->check({note_of(rank)})) continue;
    Note note;
    const auto bytes = notes_->get(note_of(rank));
    std::memcpy(&note, bytes.data(), std::min(bytes.size(), sizeof(Note)));
    if (!note.blocks(mine)) continue;
    Record record;
    record.chain = chain;
    record.event = -1;
    record.positions = mine.positions;
    record.waits = 1;
    record.write(what);
    raise(exchange(record));
  }
}

} // namespace shardwise::comm
