#include "comm/rendezvous/rendezvous.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <ios>
#include <random>
#include <sstream>
#include <thread>

namespace shardwise::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// A fresh random word.
std::string new_word() {
  std::random_device random;
  std::ostringstream word;
  word << std::hex << random() << random() << random();
  return word.str();
}

/// Polls until ask() is true or the time is over; returns which. Does not block inside the store, whose client may be
/// shared.
template <typename Ask>
bool comes(std::chrono::milliseconds timeout, const Ask& ask) {
  constexpr std::chrono::milliseconds kRarest{100};
  const auto deadline = Clock::now() + timeout;
  for (std::chrono::milliseconds pause{1}; !ask(); pause = std::min(2 * pause, kRarest)) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

/// `what`: which rank did not do what with the process group. `where`: where to look for an error.
[[noreturn]] void refuse(const GroupSpec& spec, const std::string& what, const char* where) {
  throw PeerError(c10::str(
      "shardwise: ", spec.me(), ": ", what, " the process group '", spec.name, "' within ",
      spec.connect_timeout.count(), " ms", where,
      ", check that all ranks run and make the same mesh, or allow more time (MeshOptions().connect_timeout(), the "
      "timeout of init_process_group())."));
}

constexpr auto kThere = ". Look for an error there";

/// The ranks that have not set such a key, for errors.
std::string missing(const GroupSpec& spec, const std::string& key) {
  std::string names;
  for (int other = 0; other < spec.size; ++other) {
    if (!spec.store->check({key + std::to_string(other)})) {
      names += c10::str(names.empty() ? "rank " : ", rank ", spec.name_of(other));
    }
  }
  return names;
}

std::vector<std::string> keys_of_all(const GroupSpec& spec, const std::string& key) {
  std::vector<std::string> keys;
  for (int other = 0; other < spec.size; ++other) keys.push_back(key + std::to_string(other));
  return keys;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

std::string answers_to(const GroupSpec& spec, const std::string& word, const std::string& text) {
  auto& store = *spec.store;
  store.set(word + "/here/0", new_word() + '\0' + text);
  store.set("attempt", word);
  const auto keys = keys_of_all(spec, word + "/here/");
  if (!comes(spec.connect_timeout, [&] { return store.check(keys); })) {
    refuse(spec, missing(spec, word + "/here/") + " did not join", kThere);
  }
  std::string all;
  std::vector<std::string> words;
  for (const auto& key : keys) {
    const auto answer = store.get_to_str(key);
    const auto end = answer.find('\0');
    words.push_back(answer.substr(0, end));
    all += answer.substr(end + 1) + '\0';
  }
  for (int other = 1; other < spec.size; ++other) store.set(word + "/all/" + words[other], all);
  return all;
}

} // namespace

// The value of "attempt" may be old. Only a call that repeats this rank's own word is certainly new.
Rendezvous rendezvous(const GroupSpec& spec, const std::string& text) {
  auto& store = *spec.store;
  auto word = new_word();
  std::string all;
  if (spec.rank == 0) {
    all = answers_to(spec, word, text);
  } else {
    const auto mine = word;
    std::string call;
    const auto is_called = [&] {
      if (!store.check({"attempt"})) return false;
      if (auto now = store.get_to_str("attempt"); now != call) {
        call = std::move(now);
        store.set(c10::str(call, "/here/", spec.rank), mine + '\0' + text);
      }
      return store.check({call + "/all/" + mine});
    };
    if (!comes(spec.connect_timeout, is_called)) {
      refuse(
          spec, c10::str("rank ", spec.name_of(0), " did not form"),
          ": it does not run, or waits for another rank, which its own error then names. Look for the errors of the "
          "other ranks");
    }
    all = store.get_to_str(call + "/all/" + mine);
    word = call;
  }
  return {.store = c10::make_intrusive<c10d::PrefixStore>(word, spec.store), .texts = split(all, '\0')};
}

void store_barrier(const GroupSpec& spec) {
  if (spec.size == 1) return;
  const auto sign = [&](const std::string& list, bool wait) {
    spec.store->set(list + std::to_string(spec.rank), std::string("1"));
    if (!wait) return;
    const auto keys = keys_of_all(spec, list);
    const auto came = comes(spec.connect_timeout, [&] {
      if (spec.store->check(keys)) return true;
      for (const auto position : spec.processes.ended()) {
        // A rank that has signed may end.
        if (spec.store->check({list + std::to_string(position)})) continue;
        throw PeerError(c10::str(
            "shardwise: ", spec.me(), " made the process group '", spec.name, "', but not all ranks did, because ",
            spec.processes.how_it_ended(position), "."));
      }
      return false;
    });
    if (!came) refuse(spec, missing(spec, list) + " did not finish making", kThere);
  };
  sign("made/", true);
  sign("left/", spec.rank == 0);
}

} // namespace shardwise::comm
