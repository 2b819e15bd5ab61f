// What shardwise.checkpoint is made of: pieces, the ranks that save together, and folders to read from.
#include "bindings/bindings.h"

#include "files/merge.h"
#include "files/names.h"
#include "files/place.h"
#include "files/saved_folder.h"
#include "saves/background_save.h"
#include "saves/division.h"
#include "saves/pieces.h"
#include "saves/ranks.h"
#include "saves/save.h"

#include <shardwise/error.h>
#include <shardwise/save.h>

#include <c10/util/StringUtil.h>

namespace shardwise::bindings {
namespace {

namespace py = pybind11;
using files::Json;
using saves::Piece;
using saves::Ranks;

/// A text of the program's, which a checkpoint has in UTF-8.
std::string text_of(const py::handle& text, const std::string& what) {
  if (py::isinstance<py::str>(text)) {
    if (const auto bytes = py::reinterpret_steal<py::object>(PyUnicode_AsUTF8String(text.ptr())))
      return bytes.cast<std::string>();
    PyErr_Clear();
  }
  throw ValueError(c10::str(
      "shardwise: ", what, " ", py::repr(text).cast<std::string>().substr(0, 80),
      " cannot be saved: it must be a text, without lone surrogates."));
}

Json json_of(const py::handle& value, const std::string& name) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return text_of(value, "the value '" + name + "',");
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    Json::List list;
    for (const auto& each : value) list.push_back(json_of(each, name));
    return list;
  }
  try {
    if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  } catch (const py::cast_error&) { // more than 64 bits: as below
  }
  throw ValueError(c10::str(
      "shardwise: the value '", name,
      "' cannot be saved: a checkpoint has numbers of up to 64 bits, texts, truth "
      "values and lists of these, but this is ",
      py::repr(value).cast<std::string>().substr(0, 80), ". Save tensors with tensors={...}."));
}

Json::Object json_of(const py::dict& values) {
  Json::Object object;
  for (const auto& [name, value] : values) {
    const auto text = text_of(name, "the name of a value");
    object.push_back({text, json_of(value, text)});
  }
  return object;
}

py::object python_of(const Json& json) {
  if (const auto* list = json.as<Json::List>()) {
    py::list result;
    for (const auto& each : *list) result.append(python_of(each));
    return result;
  }
  if (const auto* truth = json.as<bool>()) return py::bool_(*truth);
  if (const auto* whole = json.as<int64_t>()) return py::int_(*whole);
  if (const auto* number = json.as<double>()) return py::float_(*number);
  if (const auto* text = json.as<std::string>()) return py::str(*text);
  return py::none();
}

py::dict python_of(const Json::Object& values) {
  py::dict result;
  for (const auto& [name, value] : values) result[py::str(name)] = python_of(value);
  return result;
}

/// Python's exception goes through the engine, which tells the other ranks its text, as an Error.
std::vector<std::string> together(const Ranks& ranks, const py::function& act) {
  struct Raised : Error {
    using Error::Error;
  };
  std::optional<py::error_already_set> raised;
  try {
    return ranks.together([&] {
      try {
        const auto told = act();
        return told.is_none() ? "" : told.cast<std::string>();
      } catch (const py::error_already_set& error) {
        raised.emplace(error);
        throw Raised(py::str(error.value()).cast<std::string>());
      }
    });
  } catch (const Raised&) {
    throw *raised;
  }
}

Piece make_piece(
    std::string name, files::Sizes sizes, const std::vector<std::pair<files::Sizes, files::Sizes>>& boxes,
    at::Tensor values, bool must_agree) {
  Piece piece{std::move(name), std::move(sizes), {}, std::move(values), must_agree};
  for (const auto& [offsets, extents] : boxes) piece.boxes.push_back({offsets, extents});
  return piece;
}

/// A marker with the program's values. What cannot be saved on one rank raises on all.
files::Marker marker_of(const Ranks& ranks, const py::dict& values) {
  files::Marker about;
  ranks.together([&] {
    about.values = json_of(values);
    return "";
  });
  return about;
}

void save(const Ranks& ranks, const std::string& folder, const std::vector<Piece>& pieces, const py::dict& values) {
  auto about = marker_of(ranks, values);
  const py::gil_scoped_release unlocked;
  saves::save_pieces(ranks, files::Disk::real(), folder, pieces, std::move(about));
}

void begin(
    saves::BackgroundSave& background, const Ranks& ranks, const Ranks& beside, const std::string& folder,
    const std::vector<Piece>& pieces, const py::dict& values) {
  auto about = marker_of(ranks, values);
  const py::gil_scoped_release unlocked;
  background.begin(ranks, beside, files::Disk::real(), folder, pieces, std::move(about));
}

} // namespace

void bind_checkpoint(py::module_& module) {
  py::class_<Piece>(module, "Piece", "What a rank has of a tensor of a checkpoint.")
      .def(
          py::init(&make_piece), py::arg("name"), py::arg("sizes"), py::arg("boxes"), py::arg("values"),
          py::arg("must_agree") = false,
          "`boxes`: offsets and sizes of each; their elements, one box after the other, are those of `values`.")
      .def_readonly("name", &Piece::name)
      .def_readonly("sizes", &Piece::sizes)
      .def_readonly("values", &Piece::values);

  py::class_<Ranks>(module, "Ranks", "The ranks that save or load a checkpoint together.")
      .def(py::init<>(), "A rank that is alone.")
      .def(
          py::init([](const Mesh& mesh, const std::string& function) { return saves::ranks_on(mesh, function); }),
          NoGil(), py::arg("mesh"), py::arg("function"))
      .def_static(
          "beside", &saves::ranks_on_save_groups, NoGil(), py::arg("mesh"),
          "Over process groups that nothing else uses, for saves in the background.")
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size)
      .def(
          "together", &together, py::arg("act"),
          "What raises on one rank raises on all. Returns what each rank's call returned, a text or None for an empty "
          "one.");

  py::class_<files::SavedFolder>(module, "SavedFolder", "The tensors and values of a checkpoint.")
      .def(
          py::init([](const std::string& folder) { return files::SavedFolder(files::Disk::real(), folder); }), NoGil(),
          py::arg("folder"))
      .def_static(
          "on_all_ranks", &saves::open_checkpoint, NoGil(), py::arg("ranks"), py::arg("folder"), py::arg("entry") = "",
          "Raises Error unless all ranks name one folder and find the same checkpoint.")
      .def_property_readonly("path", [](const files::SavedFolder& folder) { return folder.index().path; })
      .def_property_readonly(
          "tensors",
          [](const files::SavedFolder& folder) {
            std::map<std::string, std::pair<at::ScalarType, files::Sizes>> tensors;
            for (const auto& [name, tensor] : folder.index().tensors) tensors[name] = {tensor.dtype, tensor.sizes};
            return tensors;
          },
          "The dtype and the sizes of each.")
      .def_property_readonly(
          "unknown", [](const files::SavedFolder& folder) { return folder.index().unknown; },
          "Tensors that cannot be read, with their dtypes, which torch does not have.")
      .def_property_readonly(
          "values", [](const files::SavedFolder& folder) { return python_of(folder.index().values); })
      .def_property_readonly(
          "world",
          [](const files::SavedFolder& folder) {
            const auto& marker = folder.index().marker;
            return marker ? std::optional(marker->world) : std::nullopt;
          },
          "How many ranks wrote it; None if another program did.")
      .def_property_readonly(
          "files",
          [](const files::SavedFolder& folder) {
            std::vector<std::string> names;
            for (const auto& [name, record] : folder.index().files) names.push_back(name);
            return names;
          })
      .def("read_piece", &saves::read_piece, NoGil(), py::arg("piece"), "New values like those of the piece.")
      .def("read_whole", &saves::read_whole, NoGil(), py::arg("name"));

  py::class_<saves::BackgroundSave>(module, "BackgroundSave", "Saves that are written while the program goes on.")
      .def(py::init<>())
      .def(
          "begin", &begin, py::arg("ranks"), py::arg("beside"), py::arg("folder"), py::arg("pieces"), py::arg("values"))
      .def("wait", &saves::BackgroundSave::wait, NoGil())
      .def(
          "finish", &saves::BackgroundSave::finish, NoGil(),
          "Waits. An error goes to stderr, and the process does not exit with 0.")
      .def_property_readonly("is_under_way", &saves::BackgroundSave::is_under_way);

  module.def(
      "check_pieces",
      [](const Ranks& ranks, const std::vector<Piece>& pieces) {
        saves::Division().among(ranks, pieces, [] { return std::string("a model"); });
      },
      NoGil(), py::arg("ranks"), py::arg("pieces"), "Raises Error unless all ranks together have each element.");
  module.def("save_pieces", &save, py::arg("ranks"), py::arg("folder"), py::arg("pieces"), py::arg("values"));
  module.def(
      "verify_checkpoint",
      [](const std::string& folder) { return files::verify_checkpoint(files::Disk::real(), folder); }, NoGil(),
      py::arg("folder"), "What is wrong with each file that is not what was saved.");
  module.def(
      "merge_checkpoint",
      [](const std::string& folder, const std::string& to, int64_t most_bytes) {
        return files::merge_checkpoint(
            files::Disk::real(), folder, to, {files::kOptimizer, files::kProgram}, most_bytes);
      },
      NoGil(), py::arg("folder"), py::arg("to"), py::arg("most_bytes"),
      "Writes the model's tensors whole, as Hugging Face's libraries read them; returns the names of the files.");
  module.def("check_export", &saves::check_export, NoGil(), py::arg("ranks"), py::arg("file"));
  module.def(
      "export_tensors",
      [](const Ranks& ranks, const std::string& file, const std::map<std::string, at::Tensor>& tensors) {
        StateDict whole;
        for (const auto& [name, tensor] : tensors) whole.insert(name, tensor);
        saves::export_tensors(ranks, file, whole);
      },
      NoGil(), py::arg("ranks"), py::arg("file"), py::arg("tensors"), "The first rank writes one safetensors file.");
  module.def(
      "leftovers",
      [](const std::string& root) {
        std::vector<std::pair<std::string, bool>> found;
        for (const auto& each : files::leftovers(files::Disk::real(), root))
          found.emplace_back(each.path, each.is_dead);
        return found;
      },
      NoGil(), py::arg("root"), "Folders that saves left, or are at work on, and whether their process has ended.");
  module.def(
      "remove_dead_leftovers",
      [](const std::string& root) { return files::remove_dead_leftovers(files::Disk::real(), root); }, NoGil(),
      py::arg("root"), "Returns those that it removed.");
  module.def("step_folder", &step_folder, py::arg("root"), py::arg("step"));
  module.def(
      "newest_step",
      [](const std::string& root) -> std::optional<std::pair<int64_t, std::string>> {
        const auto newest = newest_step(root);
        return newest ? std::optional(std::pair(newest->step, newest->folder)) : std::nullopt;
      },
      NoGil(), py::arg("root"));
  module.def("keep_newest_steps", &keep_newest_steps, NoGil(), py::arg("root"), py::arg("count"));
}

} // namespace shardwise::bindings
