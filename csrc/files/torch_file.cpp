#include "files/torch_file.h"

#include "files/in_quotes.h"
#include "files/names.h"
#include "files/pickle.h"
#include "files/tensor_header.h"
#include "files/zip_directory.h"

#include <ATen/TensorGeometry.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace shardwise::files {
namespace {

using namespace std::string_view_literals;

constexpr auto kZipMark = "PK\x03\x04"sv;
/// The pickle of a number, with which files began before torch 1.6.
constexpr auto kOldMark = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9"sv;

constexpr auto kPickleEnd = "/data.pkl"sv;
constexpr const char* kStateDictAlone =
    "Save the state dict alone in Python, of plain tensors: torch.save(model.state_dict(), file), which "
    "torch.load(file, weights_only=True) reads.";

/// The bytes from the first element of a tensor to behind the last one; nothing where that is more than any file has.
std::optional<int64_t> extent(const Sizes& sizes, const Sizes& strides, int64_t item_bytes) {
  int64_t elements = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    int64_t step = 0;
    if (__builtin_mul_overflow(sizes[dim] - 1, strides[dim], &step) ||
        __builtin_add_overflow(elements, step, &elements)) {
      return {};
    }
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements, item_bytes, &bytes)) return {};
  return bytes;
}

class StateDictReader {
 public:
  StateDictReader(DiskFile& file, const std::string& path) : path_(path), zip_(file, path) {
    const auto& entries = zip_.entries();
    const auto found = std::find_if(entries.begin(), entries.end(), [](const auto& entry) {
      const std::string_view name = entry.first;
      return name.ends_with(kPickleEnd) && name.find('/') == name.size() - kPickleEnd.size();
    });
    if (found == entries.end()) fail(c10::str("it has no data.pkl"));
    prefix_ = found->first.substr(0, found->first.size() - kPickleEnd.size() + 1);
    if (entries.contains(prefix_ + "constants.pkl")) {
      throw Error(c10::str(
          "shardwise: ", path_,
          " cannot be loaded: it is of torch.jit.save(), or of torch::save() in C++. Load it with "
          "torch::load() into a module that is not wrapped yet, or ",
          lower_first(kStateDictAlone)));
    }
    const auto order =
        entries.contains(prefix_ + "byteorder") ? content_of(file, prefix_ + "byteorder", 100) : "little";
    if (order != "little") {
      throw Error(c10::str(
          "shardwise: ", path_, " cannot be loaded: its byte order is ", in_quotes(order),
          ", and this machine's is little. Load and save it in Python on this machine."));
    }
    pickle_ = parse_pickle(content_of(file, found->first, kLongestHeader), c10::str("data.pkl in ", path_));
  }

  TorchFile read(const std::string& entry) {
    const auto* dict = dict_at(pickle_.root);
    if (dict == nullptr) fail_needs("it", pickle_.root);
    for (const auto& [key, id] : *dict) {
      const auto* name = pickle_.as<std::string>(key);
      if (auto value = value_at(id); name != nullptr && value) result_.values.emplace_back(*name, std::move(*value));
    }
    if (!entry.empty()) {
      const auto found = std::find_if(dict->begin(), dict->end(), [&](const auto& item) {
        const auto* name = pickle_.as<std::string>(item.first);
        return name != nullptr && *name == entry;
      });
      dict = found == dict->end() ? nullptr : dict_at(found->second);
      if (dict == nullptr) {
        throw Error(c10::str(
            "shardwise: ", path_, " has no entry ", in_quotes(entry),
            " that is a dictionary. Its entries that are: ", c10::Join(", ", state_dicts()), "."));
      }
    } else if (const auto names = state_dicts(); !names.empty() && !has_tensors(*dict)) {
      throw Error(c10::str(
          "shardwise: ", path_, " has no tensors but in its entries ", c10::Join(", ", names),
          ". Name the one that is the model's state dict: LoadOptions().entry(name), in Python entry=name."));
    }
    for (const auto& [key, id] : *dict) add(key, id);
    return std::move(result_);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    fail_torch_file(path_, why);
  }
  /// For an object that is not what it should be.
  [[noreturn]] void fail_needs(const std::string& what, PickleId id) const {
    const auto& object = pickle_.objects.at(id);
    std::string kind = "a value of another kind";
    if (const auto name = callee(id); !name.empty()) kind = c10::str("made by ", in_quotes(name), " in Python");
    if (const auto* global = pickle_.as<PickleGlobal>(id)) kind = c10::str(in_quotes(global->name), " of Python");
    if (std::holds_alternative<PickleList>(object)) kind = "a list or a tuple";
    throw Error(c10::str(
        "shardwise: ", path_, " cannot be loaded: ", what, " is ", kind, ", not a ",
        what == "it" ? "state dict" : "plain tensor", ". ", kStateDictAlone));
  }

  static std::string lower_first(std::string text) {
    text[0] = static_cast<char>(std::tolower(text[0]));
    return text;
  }

  std::string content_of(DiskFile& file, const std::string& name, int64_t most) {
    const auto [begin, end] = zip_.range(name);
    if (end - begin > most) fail(c10::str("its ", in_quotes(name), " has ", end - begin, " bytes, more than ", most));
    std::string text(static_cast<size_t>(end - begin), '\0');
    read_all(file, std::as_writable_bytes(std::span(text)), begin, path_);
    return text;
  }

  /// The name of what makes this object; "" if nothing does.
  std::string callee(PickleId id) const {
    const auto* call = pickle_.as<PickleCall>(id);
    const auto* global = call == nullptr ? nullptr : pickle_.as<PickleGlobal>(call->callee);
    return global == nullptr ? "" : global->name;
  }
  const PickleDict* dict_at(PickleId id) const {
    if (callee(id) == "collections.OrderedDict") return &pickle_.as<PickleCall>(id)->items;
    return pickle_.as<PickleDict>(id);
  }
  std::optional<Json> value_at(PickleId id) const {
    if (const auto* truth = pickle_.as<bool>(id)) return Json(*truth);
    if (const auto* whole = pickle_.as<int64_t>(id)) return Json(*whole);
    if (const auto* number = pickle_.as<double>(id)) return Json(*number);
    if (const auto* text = pickle_.as<std::string>(id)) return Json(*text);
    return {};
  }

  bool has_tensors(const PickleDict& dict) const {
    return std::any_of(
        dict.begin(), dict.end(), [&](const auto& item) { return callee(item.second).starts_with("torch."); });
  }
  /// The names of what may be one.
  std::vector<std::string> state_dicts() const {
    std::vector<std::string> names;
    for (const auto& [key, id] : *dict_at(pickle_.root)) {
      const auto* name = pickle_.as<std::string>(key);
      const auto* dict = dict_at(id);
      if (name != nullptr && dict != nullptr) names.push_back(in_quotes(*name));
    }
    return names;
  }

  // What is neither a tensor nor something that only Python can make says nothing of parameters and buffers.
  void add(PickleId key, PickleId id) {
    const bool is_made = pickle_.as<PickleCall>(id) != nullptr || pickle_.as<PickleGlobal>(id) != nullptr ||
                         pickle_.as<PickleOutside>(id) != nullptr;
    if (!is_made || dict_at(id) != nullptr) return;
    const auto* name = pickle_.as<std::string>(key);
    if (name == nullptr) fail("the name of a tensor is not a text");
    if (name->starts_with(kOptimizer) || name->starts_with(kProgram)) {
      throw Error(c10::str(
          "shardwise: ", path_, " cannot be loaded: its tensor ", in_quotes(*name),
          " cannot be told from what else a checkpoint has, since names with '", kOptimizer, "' and '", kProgram,
          "' are for that. Rename it."));
    }
    if (!result_.tensors.emplace(*name, tensor(*name, id)).second)
      fail(c10::str("it has ", in_quotes(*name), " twice"));
  }

  [[noreturn]] void fail_at(const std::string& tensor, const std::string& what) const {
    fail(c10::str("its tensor ", in_quotes(tensor), " ", what));
  }
  /// What makes a tensor is called with.
  const PickleList& arguments(const std::string& tensor, PickleId id, size_t least) const {
    const auto* list = pickle_.as<PickleList>(pickle_.as<PickleCall>(id)->arguments);
    if (list == nullptr || list->size() < least) fail_at(tensor, c10::str("is not made of ", least, " values"));
    return *list;
  }
  int64_t count(const std::string& tensor, PickleId id) const {
    const auto* number = pickle_.as<int64_t>(id);
    if (number == nullptr || *number < 0) fail_at(tensor, "has a size, stride or offset that is none");
    return *number;
  }
  Sizes counts(const std::string& tensor, PickleId id) const {
    const auto* list = pickle_.as<PickleList>(id);
    if (list == nullptr || list->size() > kMostDimensions)
      fail_at(tensor, c10::str("has sizes or strides that are no list of ", kMostDimensions, " at most"));
    Sizes result;
    for (const auto each : *list) result.push_back(count(tensor, each));
    return result;
  }

  SavedTensor tensor(const std::string& name, PickleId id) {
    const auto what = c10::str("its ", in_quotes(name));
    if (callee(id) == "torch._utils._rebuild_parameter") id = arguments(name, id, 1)[0];
    const auto made_by = callee(id);
    // A later one gives the dtype too.
    const bool has_dtype = made_by == "torch._utils._rebuild_tensor_v3";
    if (!has_dtype && made_by != "torch._utils._rebuild_tensor_v2") fail_needs(what, id);
    const auto& made_of = arguments(name, id, has_dtype ? 7 : 6);
    // What else it has, such as that it is the conjugate of what is stored.
    const auto more = has_dtype ? size_t{7} : size_t{6};
    if (made_of.size() > more && pickle_.as<std::nullptr_t>(made_of[more]) == nullptr) fail_needs(what, id);

    // Memory of a type, a key and so many elements.
    const auto* outside = pickle_.as<PickleOutside>(made_of[0]);
    const auto* memory = outside == nullptr ? nullptr : pickle_.as<PickleList>(outside->which);
    const auto* key = memory == nullptr || memory->size() < 5 ? nullptr : pickle_.as<std::string>((*memory)[2]);
    if (key == nullptr) fail_at(name, "has no memory");
    const auto named = (*memory)[1];
    const auto type = dtype_at(has_dtype ? made_of[6] : named, has_dtype);
    if (!type) fail_needs(what, has_dtype ? made_of[6] : named);
    const auto range = zip_.range(c10::str(prefix_, "data/", *key));

    SavedTensor result{.dtype = *type, .sizes = counts(name, made_of[2]), .chunks = {}};
    const auto item_bytes = static_cast<int64_t>(c10::elementSize(*type));
    auto strides = counts(name, made_of[3]);
    if (strides.size() != result.sizes.size()) fail_at(name, "has not as many strides as sizes");
    const auto bytes = extent(result.sizes, strides, item_bytes);
    int64_t skipped = 0;
    const bool is_there = bytes && !__builtin_mul_overflow(count(name, made_of[1]), item_bytes, &skipped) &&
                          *bytes <= range.end - range.begin && skipped <= range.end - range.begin - *bytes;
    if (!is_there) {
      fail_at(
          name, c10::str(
                    "has the sizes ", text_of(result.sizes), ", which do not lie in its memory of ",
                    range.end - range.begin, " bytes"));
    }
    const auto numel = product_of(result.sizes);
    if (!numel || *numel > (range.end - range.begin) / item_bytes) {
      throw Error(c10::str(
          "shardwise: ", path_, " cannot be loaded: elements of its ", in_quotes(name),
          ", as of an expanded tensor, "
          "share memory. Save a copy: clone(memory_format=torch.contiguous_format)."));
    }
    const auto begin = range.begin + skipped;
    if (at::geometry_is_contiguous(result.sizes, strides)) strides.clear();
    result.chunks.push_back(
        {.file = name_of(path_),
         .box = Box::whole(result.sizes),
         .begin = begin,
         .end = begin + *bytes,
         .strides = strides});
    return result;
  }

  /// The type of elements that a global names, as torch.float32 does or, of a memory, torch.FloatStorage.
  std::optional<c10::ScalarType> dtype_at(PickleId id, bool is_dtype) const {
    const auto* global = pickle_.as<PickleGlobal>(id);
    const auto is_named = [&](c10::ScalarType type) {
      const auto name =
          is_dtype ? std::string(c10::getDtypeNames(type).first) : c10::str(c10::toString(type), "Storage");
      return global != nullptr && global->name == "torch." + name;
    };
    for (const auto& [name, type] : kNamedDtypes) {
      if (is_named(type)) return type;
    }
    // Safetensors has no name for it.
    return is_named(c10::ScalarType::ComplexDouble) ? std::optional(c10::ScalarType::ComplexDouble) : std::nullopt;
  }

  const std::string& path_;
  ZipDirectory zip_;
  /// What all names of the archive begin with.
  std::string prefix_;
  Pickle pickle_;
  TorchFile result_;
};

/// The bytes by which its format is known, unless that is an old one of torch.save().
std::string first_bytes(DiskFile& file, const std::string& path) {
  std::string first(static_cast<size_t>(std::min<int64_t>(file.size(), kOldMark.size())), '\0');
  read_all(file, std::as_writable_bytes(std::span(first)), 0, path);
  if (first == kOldMark) {
    throw Error(c10::str(
        "shardwise: ", path,
        " is in the format that torch.save() had before torch 1.6, or has with "
        "_use_new_zipfile_serialization=False. Load it in Python and save it again: torch.save(torch.load(file), "
        "file)."));
  }
  return first;
}

} // namespace

bool is_torch_file(DiskFile& file, const std::string& path) {
  const auto first = first_bytes(file, path);
  // The length of a safetensors header may begin with the same bytes; the header follows it.
  return first.starts_with(kZipMark) && first.back() != '{';
}

TorchFile read_torch_file(DiskFile& file, const std::string& path, const std::string& entry) {
  first_bytes(file, path);
  return StateDictReader(file, path).read(entry);
}

} // namespace shardwise::files
