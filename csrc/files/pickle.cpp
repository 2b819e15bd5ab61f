#include "files/pickle.h"

#include "files/in_quotes.h"
#include "files/little_endian.h"
#include "files/tensor_header.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <bit>
#include <unordered_map>

namespace shardwise::files {
namespace {

class Machine {
 public:
  Machine(std::string_view text, const std::string& what) : text_(text), what_(what) {}

  Pickle run() {
    for (size_t operations = 0; operations < kMostPickleOperations; ++operations) {
      const auto operation = static_cast<unsigned char>(take(1)[0]);
      if (operation == '.') {
        pickle_.root = pop();
        return std::move(pickle_);
      }
      run(operation);
    }
    fail(c10::str("it has more than ", kMostPickleOperations, " operations"));
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(
        c10::str("shardwise: ", what_, " is not a pickle, or is broken: at its byte ", at_, " ", why, ". ", kRemedy));
  }

  std::string_view take(uint64_t bytes) {
    if (bytes > text_.size() - at_) fail(c10::str("it ends, but should go on for ", bytes, " bytes"));
    const auto taken = text_.substr(at_, static_cast<size_t>(bytes));
    at_ += taken.size();
    return taken;
  }
  uint64_t number(uint64_t bytes) {
    return little_endian(take(bytes));
  }
  std::string_view line() {
    const auto end = text_.find('\n', at_);
    if (end == std::string_view::npos) fail("a line does not end");
    const auto taken = take(end - at_);
    take(1);
    return taken;
  }

  void push(PickleObject object) {
    pickle_.objects.push_back(std::move(object));
    stack_.push_back(pickle_.objects.size() - 1);
  }
  void push_text(std::string_view text) {
    if (!is_utf8(text)) fail(c10::str("the text ", in_quotes(text), " is not UTF-8"));
    push(std::string(text));
  }
  PickleId top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("an object is missing");
    return stack_.back();
  }
  PickleId pop() {
    const auto id = top();
    stack_.pop_back();
    return id;
  }
  /// All since the last mark.
  PickleList pop_marked() {
    if (marks_.empty()) fail("a mark is missing");
    PickleList items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  /// So many from the top.
  PickleList pop_some(size_t count) {
    PickleList items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }

  void push_whole_number(std::string_view bytes) {
    const bool is_negative = !bytes.empty() && static_cast<signed char>(bytes.back()) < 0;
    if (bytes.size() <= 8) {
      const auto above = is_negative && bytes.size() < 8 ? ~uint64_t{0} << (8 * bytes.size()) : 0;
      return push(static_cast<int64_t>(little_endian(bytes) | above));
    }
    double value = is_negative ? -1 : 0;
    for (size_t i = bytes.size(); i-- > 0;) value = value * 256 + static_cast<unsigned char>(bytes[i]);
    push(value);
  }
  void push_global(std::string_view module, std::string_view name) {
    if (!is_utf8(module) || !is_utf8(name)) fail("a name is not UTF-8");
    push(PickleGlobal{c10::str(module, ".", name)});
  }
  void push_call(PickleId callee, PickleId arguments) {
    push(PickleCall{.callee = callee, .arguments = arguments});
  }

  // What Python adds to objects of other classes says nothing to us.
  void append(const PickleList& items) {
    if (auto* list = std::get_if<PickleList>(&pickle_.objects[top()]))
      list->insert(list->end(), items.begin(), items.end());
  }
  void set_items(const PickleList& items) {
    if (items.size() % 2 != 0) fail("a key has no value");
    auto& object = pickle_.objects[top()];
    auto* call = std::get_if<PickleCall>(&object);
    auto* dict = call != nullptr ? &call->items : std::get_if<PickleDict>(&object);
    if (dict == nullptr) fail("something that is no dictionary has keys");
    for (size_t i = 0; i < items.size(); i += 2) dict->emplace_back(items[i], items[i + 1]);
  }

  void store(uint64_t place) {
    memory_[place] = top();
  }
  void recall(uint64_t place) {
    const auto found = memory_.find(place);
    if (found == memory_.end()) fail(c10::str("it recalls the object ", place, ", which it did not store"));
    stack_.push_back(found->second);
  }

  void run(unsigned char operation) {
    switch (operation) {
      case 0x80: // the protocol
        if (const auto protocol = number(1); protocol < 2 || protocol > 5)
          fail(c10::str("it has the protocol ", protocol, ", which is not one of 2 to 5"));
        return;
      case 0x95: // a frame
        take(8);
        return;
      case '(':
        marks_.push_back(stack_.size());
        return;
      case '0':
        pop();
        return;
      case '1':
        pop_marked();
        return;
      case '2':
        stack_.push_back(top());
        return;
      case 'N':
        return push(nullptr);
      case 0x88:
      case 0x89:
        return push(operation == 0x88);
      case 'J':
        return push(int64_t{static_cast<int32_t>(number(4))});
      case 'K':
        return push(static_cast<int64_t>(number(1)));
      case 'M':
        return push(static_cast<int64_t>(number(2)));
      case 0x8a:
        return push_whole_number(take(number(1)));
      case 0x8b:
        return push_whole_number(take(number(4)));
      case 'G': // the highest byte first
        return push(std::bit_cast<double>(__builtin_bswap64(number(8))));
      case 0x8c:
        return push_text(take(number(1)));
      case 'X':
        return push_text(take(number(4)));
      case 0x8d:
        return push_text(take(number(8)));
      case 'U': // bytes, in several ways
      case 'C':
        take(number(1));
        return push(nullptr);
      case 'T':
      case 'B':
        take(number(4));
        return push(nullptr);
      case 0x8e:
      case 0x96:
        take(number(8));
        return push(nullptr);
      case ']':
      case ')':
      case 0x8f:
        return push(PickleList());
      case 'l':
      case 't':
      case 0x91:
        return push(pop_marked());
      case 0x85:
      case 0x86:
      case 0x87:
        return push(pop_some(operation - size_t{0x84}));
      case 'a':
        return append(pop_some(1));
      case 'e':
      case 0x90:
        return append(pop_marked());
      case '}':
        return push(PickleDict());
      case 's':
        return set_items(pop_some(2));
      case 'u':
        return set_items(pop_marked());
      case 'd': {
        const auto items = pop_marked();
        push(PickleDict());
        return set_items(items);
      }
      case 'c': {
        const auto module = line();
        return push_global(module, line());
      }
      case 0x93: {
        const auto names = pop_some(2);
        const auto* module = pickle_.as<std::string>(names[0]);
        const auto* name = pickle_.as<std::string>(names[1]);
        if (module == nullptr || name == nullptr) fail("the name of a class or function is not a text");
        return push_global(*module, *name);
      }
      case 'R':    // a function of a tuple
      case 0x81: { // a class of a tuple
        const auto both = pop_some(2);
        return push_call(both[0], both[1]);
      }
      case 0x92: { // a class of a tuple and a dictionary
        const auto all = pop_some(3);
        return push_call(all[0], all[1]);
      }
      case 'b': // the attributes of an object, such as the versions of modules in a state dict
        pop();
        top();
        return;
      case 'Q':
        return push(PickleOutside{pop()});
      case 'q':
        return store(number(1));
      case 'r':
        return store(number(4));
      case 0x94:
        return store(memory_.size());
      case 'h':
        return recall(number(1));
      case 'j':
        return recall(number(4));
      default:
        fail(c10::str("it has the operation ", int{operation}, ", which state dicts do not need"));
    }
  }

  std::string_view text_;
  const std::string& what_;
  size_t at_ = 0;
  Pickle pickle_;
  std::vector<PickleId> stack_;
  /// How many objects there were on the stack.
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleId> memory_;
};

} // namespace

Pickle parse_pickle(std::string_view text, const std::string& what) {
  return Machine(text, what).run();
}

} // namespace shardwise::files
