#pragma once

#include "comm/agree/agreement.h"
#include "transport/transport.h"

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

} // namespace shardwise::comm
