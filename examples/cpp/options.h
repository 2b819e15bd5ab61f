#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>

/// The arguments of the program. examples/python/gpt.py takes the same but for --mode.
struct Options {
  /// The text to learn: any file.
  std::filesystem::path corpus;
  /// An existing folder for the records.
  std::filesystem::path out;
  int64_t steps = 200;
  /// Sequences a rank and step.
  int64_t batch = 8;
  uint64_t seed = 1;
  /// What spreads the model over the ranks: "replicate", "fully_shard", or "3d" for 8 ranks (three_d.h).
  std::string mode = "replicate";
  /// Above 0: no ranks. One process takes the batches of that many ranks and averages their gradients by itself.
  int64_t reference_of = 0;

  /// Raises std::invalid_argument that names the argument at fault.
  static Options parse(int count, char** arguments) {
    std::map<std::string, std::string> given;
    for (int i = 1; i < count; i += 2) {
      if (i + 1 == count) throw std::invalid_argument(std::string("gpt: ") + arguments[i] + " needs a value.");
      given[arguments[i]] = arguments[i + 1];
    }
    Options options;
    options.corpus = take(given, "--corpus", "");
    options.out = take(given, "--out", "");
    options.steps = number(given, "--steps", options.steps, 1);
    options.batch = number(given, "--batch", options.batch, 1);
    options.seed = static_cast<uint64_t>(number(given, "--seed", static_cast<int64_t>(options.seed), 0));
    options.mode = take(given, "--mode", options.mode);
    if (options.mode != "replicate" && options.mode != "fully_shard" && options.mode != "3d") {
      throw std::invalid_argument("gpt: --mode is '" + options.mode + "'; it must be replicate, fully_shard or 3d.");
    }
    options.reference_of = number(given, "--reference-of", options.reference_of, 0);
    if (!given.empty()) {
      throw std::invalid_argument(
          "gpt: there is no argument " + given.begin()->first +
          "; there are --corpus --out --steps --batch --seed --mode --reference-of, each with a value.");
    }
    for (const auto& [name, path] : {std::pair{"--corpus", options.corpus}, std::pair{"--out", options.out}}) {
      if (path.empty()) throw std::invalid_argument(std::string("gpt: ") + name + " is missing.");
    }
    return options;
  }

 private:
  using Given = std::map<std::string, std::string>;

  static std::string take(Given& given, const std::string& name, const std::string& otherwise) {
    const auto entry = given.extract(name);
    return entry ? entry.mapped() : otherwise;
  }

  static int64_t number(Given& given, const std::string& name, int64_t otherwise, int64_t least) {
    const auto text = take(given, name, std::to_string(otherwise));
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(text, &used);
    } catch (const std::logic_error&) {
      used = 0;
    }
    if (used == 0 || used != text.size() || value < least) {
      throw std::invalid_argument(
          "gpt: " + name + " is '" + text + "'; it must be a whole number, " + std::to_string(least) + " or more.");
    }
    return value;
  }
};
