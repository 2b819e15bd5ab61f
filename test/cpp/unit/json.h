#pragma once

#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardwise::test {

/// A value of a JSON text. Whole numbers only.
struct Json {
  std::string text;
  int64_t number = 0;
  std::vector<Json> list;
  std::map<std::string, Json> object;

  /// Raises std::runtime_error where the text is not JSON.
  static Json parse(const std::string& text);
};

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json all() {
    auto result = value();
    skip_blanks();
    if (at_ != text_.size()) fail("more after the end");
    return result;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("not JSON at " + std::to_string(at_) + ": " + why);
  }
  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  char take() {
    if (at_ == text_.size()) fail("it ends too early");
    return text_[at_++];
  }
  bool takes(char expected) {
    skip_blanks();
    if (at_ == text_.size() || text_[at_] != expected) return false;
    ++at_;
    return true;
  }
  void expect(char expected) {
    if (!takes(expected)) fail(std::string("no ") + expected);
  }

  Json value() {
    Json result;
    if (takes('{')) {
      if (takes('}')) return result;
      do {
        skip_blanks();
        expect('"');
        const auto key = rest_of_string();
        expect(':');
        if (!result.object.emplace(key, value()).second) fail("the key " + key + " comes twice");
      } while (takes(','));
      expect('}');
    } else if (takes('[')) {
      if (takes(']')) return result;
      do result.list.push_back(value());
      while (takes(','));
      expect(']');
    } else if (takes('"')) {
      result.text = rest_of_string();
    } else {
      size_t digits = 0;
      result.number = std::stoll(text_.substr(at_), &digits);
      at_ += digits;
    }
    return result;
  }

  std::string rest_of_string() {
    std::string result;
    for (char c = take(); c != '"'; c = take()) {
      if (static_cast<unsigned char>(c) < 0x20) fail("a bare control character");
      if (c != '\\') {
        result += c;
        continue;
      }
      const char escape = take();
      if (escape == '"' || escape == '\\') {
        result += escape;
      } else if (escape == 'u') {
        std::string digits;
        for (int i = 0; i < 4; ++i) digits += take();
        if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) fail("a bad \\u");
        result += static_cast<char>(std::stoi(digits, nullptr, 16));
      } else {
        fail("an unknown escape");
      }
    }
    return result;
  }

  const std::string& text_;
  size_t at_ = 0;
};

inline Json Json::parse(const std::string& text) {
  return JsonReader(text).all();
}

} // namespace shardwise::test
