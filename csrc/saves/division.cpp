#include "saves/division.h"

#include "base/compute_guard.h"
#include "files/checksum.h"
#include "files/json.h"
#include "files/tensor_header.h"

#include <shardwise/error.h>

#include <ATen/ops/cat.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>

namespace shardwise::saves {
namespace {

/// A checksum of some elements, which tells apart what is not the same tensor: the first ones and the last ones.
std::string sample_of(const at::Tensor& values) {
  constexpr int64_t kElements = 32;
  const base::ComputeGuard guard;
  const auto all = values.detach().reshape({-1});
  const auto count = std::min(kElements, all.numel());
  const auto some = at::cat({all.narrow(0, 0, count), all.narrow(0, all.numel() - count, count)}).to(at::kCPU);
  const files::Bytes bytes(static_cast<const std::byte*>(some.const_data_ptr()), some.nbytes());
  return files::checksum_text(files::checksum(bytes));
}

using files::Box;
using files::Json;
using files::Sizes;

Sizes sizes_of(const Json& json) {
  Sizes sizes;
  for (const auto& each : *json.as<Json::List>()) sizes.push_back(*each.as<int64_t>());
  return sizes;
}

/// What a rank has, for the others: name, dtype, bytes of an element, sizes, boxes and sample of each piece.
std::string describe(const std::vector<Piece>& pieces) {
  Json::List all;
  for (const auto& piece : pieces) {
    Json::List boxes;
    for (const auto& box : piece.boxes) boxes.emplace_back(Json::List{box.offsets, box.sizes});
    all.emplace_back(Json::List{
        piece.name, files::dtype_name(piece.values.scalar_type(), piece.name),
        static_cast<int64_t>(piece.values.element_size()), piece.sizes, std::move(boxes),
        piece.must_agree ? sample_of(piece.values) : ""});
  }
  return files::json_text(all);
}

/// A box, and who has it where.
struct Held {
  Box box;
  /// Of the first holder that has one; "" if none has.
  std::string sample;
  int64_t sampled_on = 0;
  std::vector<std::pair<int64_t, BoxOfPiece>> holders;
};

struct Tensor {
  std::string dtype;
  int64_t item_bytes = 1;
  Sizes sizes;
  int64_t first_rank = 0;
  std::vector<Held> boxes;
};

using Tensors = std::map<std::string, Tensor>;

void check_sample(const std::string& name, Held& held, int64_t rank, const std::string& sample) {
  if (held.sample.empty()) {
    held.sample = sample;
    held.sampled_on = rank;
  } else if (!sample.empty() && sample != held.sample) {
    throw Error(c10::str(
        "shardwise: '", name, "' has other values on rank ", rank, " than on rank ", held.sampled_on,
        ", so one checkpoint cannot have both. Ranks that have the same name must have the same tensor: give "
        "different ones different names, or save them to folders of their own."));
  }
}

void add(Tensors& tensors, int64_t rank, const Json& text) {
  const auto& pieces = *text.as<Json::List>();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& piece = *pieces[i].as<Json::List>();
    const auto& name = *piece[0].as<std::string>();
    const auto& dtype = *piece[1].as<std::string>();
    const auto sizes = sizes_of(piece[3]);
    const auto [entry, is_new] = tensors.try_emplace(name);
    auto& tensor = entry->second;
    if (is_new) tensor = {dtype, *piece[2].as<int64_t>(), sizes, rank, {}};
    if (tensor.dtype != dtype || tensor.sizes != sizes) {
      throw Error(c10::str(
          "shardwise: '", name, "' is ", tensor.dtype, " of ", files::text_of(tensor.sizes), " on rank ",
          tensor.first_rank, ", but ", dtype, " of ", files::text_of(sizes), " on rank ", rank,
          ". All ranks must save the same tensors."));
    }
    const auto& boxes = *piece[4].as<Json::List>();
    for (size_t k = 0; k < boxes.size(); ++k) {
      const auto& sides = *boxes[k].as<Json::List>();
      Box box{sizes_of(sides[0]), sizes_of(sides[1])};
      const auto same = [&](const Held& held) { return held.box == box; };
      auto held = std::find_if(tensor.boxes.begin(), tensor.boxes.end(), same);
      if (held == tensor.boxes.end()) held = tensor.boxes.insert(held, {std::move(box), "", 0, {}});
      check_sample(name, *held, rank, *piece[5].as<std::string>());
      held->holders.emplace_back(rank, BoxOfPiece{i, k});
    }
  }
}

void check_cover(const std::string& name, const Tensor& tensor) {
  std::vector<Box> boxes;
  for (const auto& held : tensor.boxes) boxes.push_back(held.box);
  const auto problem = files::cover_error(tensor.sizes, boxes);
  if (problem.empty()) return;
  throw Error(c10::str(
      "shardwise: what the ranks have of '", name, "' is not the whole tensor of ", files::text_of(tensor.sizes), ": ",
      problem, ". All ranks that hold parts of it must save together."));
}

void check_labels(const std::vector<std::string>& labels) {
  for (size_t rank = 0; rank < labels.size(); ++rank) {
    if (labels[rank] == labels.front()) continue;
    throw Error(c10::str(
        "shardwise: rank ", rank, " saves ", labels[rank], ", but rank 0 saves ", labels.front(),
        ". All ranks must call the same function with the same folder and values."));
  }
}

/// What this rank writes, of what all ranks said that they have.
std::vector<BoxOfPiece> share_of(int64_t rank, const std::vector<std::string>& texts) {
  Tensors tensors;
  for (size_t k = 0; k < texts.size(); ++k) {
    add(tensors, static_cast<int64_t>(k), files::parse_json(texts[k], c10::str("what rank ", k, " saves")));
  }
  std::vector<int64_t> bytes(texts.size(), 0);
  std::vector<BoxOfPiece> mine;
  for (const auto& [name, tensor] : tensors) {
    check_cover(name, tensor);
    const bool is_empty = Box::whole(tensor.sizes).numel() == 0;
    for (size_t k = 0; k < tensor.boxes.size(); ++k) {
      const auto& held = tensor.boxes[k];
      // An empty tensor has one box, an empty one; of others an empty box has nothing.
      if (is_empty ? k > 0 : held.box.numel() == 0) continue;
      const auto least = std::min_element(held.holders.begin(), held.holders.end(), [&](auto& one, auto& other) {
        return bytes[static_cast<size_t>(one.first)] < bytes[static_cast<size_t>(other.first)];
      });
      bytes[static_cast<size_t>(least->first)] += held.box.numel() * tensor.item_bytes;
      if (least->first == rank) mine.push_back(least->second);
    }
  }
  return mine;
}

} // namespace

const std::vector<BoxOfPiece>& Division::among(
    const Ranks& ranks, const std::vector<Piece>& pieces, const std::function<std::string()>& label) {
  constexpr size_t kDigits = 16;
  std::string described;
  // In front of the label: what it was that all ranks said the last time, where this rank would say the same again.
  auto labels = ranks.together([&] {
    described = describe(pieces);
    return (described == described_ ? files::checksum_text(of_all_) : std::string(kDigits, '-')) + label();
  });
  const bool is_same = !described_.empty() && std::all_of(labels.begin(), labels.end(), [&](const auto& text) {
    return text.starts_with(files::checksum_text(of_all_));
  });
  for (auto& text : labels) text.erase(0, kDigits);
  check_labels(labels);
  if (is_same) return mine_;
  described_.clear();
  const auto texts = ranks.together([&] { return described; });
  mine_ = share_of(ranks.rank(), texts);
  std::string all;
  for (const auto& text : texts) all += text + '\n';
  of_all_ = files::checksum(all);
  described_ = std::move(described);
  return mine_;
}

} // namespace shardwise::saves
