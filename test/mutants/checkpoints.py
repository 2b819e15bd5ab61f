"""The files of checkpoints: what makes them survive a crash, and what is verified before it is used."""

from __future__ import annotations

from mutant import Mutant, python_mutants

_package = python_mutants("python/shardwise")
_PYTHON = "interop/test_sharded_checkpoints.py"

CHECKPOINTS = [
    Mutant(
        "rename a checkpoint whose files are not synced",
        "csrc/files/tensor_writer.cpp",
        "  file->sync();\n",
        "",
    ),
    Mutant(
        "rename a checkpoint whose folder is not synced",
        "csrc/files/saving.cpp",
        "  write_marker(disk, saving.folder, marker);\n  disk.sync_folder(saving.folder);\n",
        "  write_marker(disk, saving.folder, marker);\n",
    ),
    Mutant(
        "write the marker when the checkpoint is in its place",
        "csrc/files/saving.cpp",
        "  write_marker(disk, saving.folder, marker);\n  disk.sync_folder(saving.folder);\n"
        "  const auto before = put_in_place(disk, saving);\n",
        "  const auto before = put_in_place(disk, saving);\n"
        "  write_marker(disk, saving.place, marker);\n  disk.sync_folder(saving.place);\n",
    ),
    Mutant(
        "remove the checkpoint before while the new one may be lost",
        "csrc/files/saving.cpp",
        "  disk.sync_folder(folder_of(saving.place));\n",
        "",
    ),
    Mutant(
        "take what is aside after an error for the checkpoint that failed",
        "csrc/files/saving.cpp",
        "return !marker || marker->save == saving.owner.text();",
        "return true;",
    ),
    Mutant(
        "remove old steps while the newest may be lost",
        "csrc/files/steps.cpp",
        "  disk.sync_folder(root);\n  for",
        "  for",
    ),
    Mutant(
        "hand out values that are not verified",
        "csrc/files/tensor_reader.cpp",
        "if (!record_ || checksum(bytes) ==",
        "if (!record_ || !buffer_ || checksum(bytes) ==",
    ),
    Mutant(
        "read a header that is not verified",
        "csrc/files/tensor_reader.cpp",
        " || checksum(start) != record_->header_checksum",
        "",
    ),
    Mutant(
        "believe a marker that is not verified",
        "csrc/files/marker.cpp",
        "if (expected != checksum(text))",
        "if (!expected)",
    ),
    Mutant(
        "follow an index out of its folder",
        "csrc/files/hugging_face_index.cpp",
        "if (file == nullptr || !is_tensor_file(*file)) {",
        "if (file == nullptr) {",
    ),
    Mutant(
        "take one of ours without its marker for one of others",
        "csrc/files/folder_index.cpp",
        "    if (!index_.marker) check_foreign(reader.header());\n",
        "",
    ),
    Mutant(
        "blame the files of a checkpoint that was replaced",
        "csrc/files/folder_index.cpp",
        "  if (!now || now->save == index.marker->save) return;\n",
        "  return;\n",
    ),
    Mutant(
        "leave what dead saves left beside the next one",
        "csrc/files/saving.cpp",
        "    remove_dead_leftovers(disk, root);\n",
        "",
    ),
    Mutant(
        "give up a folder that another rank still writes to",
        "csrc/files/place.cpp",
        "if (!is_empty || error.number() != ENOTEMPTY",
        "if (is_empty || error.number() != ENOTEMPTY",
    ),
    Mutant(
        "load what different saves wrote on the ranks",
        "csrc/saves/load_pieces.cpp",
        "    if (saves[rank] == saves.front()) continue;\n",
        "    continue;\n",
        suites="Save.*",
    ),
    Mutant(
        "load from folders that differ between ranks",
        "csrc/saves/ranks.cpp",
        "    if (places[rank] == places.front()) continue;\n",
        "    continue;\n",
        suites="Save.*",
    ),
    Mutant(
        "end well where nobody saw that the last save failed",
        "csrc/saves/background_save.cpp",
        "std::exit(EXIT_FAILURE)",
        "std::exit(EXIT_SUCCESS)",
        suites="Saver.*",
    ),
    Mutant(
        "load no options of an optimizer",
        "csrc/saves/load.cpp",
        "      optimizer_->set_options(parameter.group, options);\n",
        "",
        suites="Save.*",
    ),
    Mutant(
        "read all boxes of a range to one place",
        "csrc/saves/load_pieces.cpp",
        "    next += bytes;\n",
        "",
        suites="Save.*",
    ),
    Mutant(
        "write what the program changes meanwhile",
        "csrc/saves/snapshot.cpp",
        "  values = std::move(copies);\n",
        "",
        suites="Saver.*",
    ),
    Mutant(
        "take what one rank has anew for what it had",
        "csrc/saves/division.cpp",
        "std::all_of(labels.begin()",
        "std::any_of(labels.begin()",
        suites="Saver.*",
    ),
    _package(
        "take no option of an optimizer from a checkpoint",
        "_saved_optimizer.py",
        "group[last] = _option_like(group.get(last), saved.read(name))",
        "pass",
        _PYTHON,
    ),
    _package(
        "read what is saved and leave the model as it is",
        "checkpoint.py",
        "target.copy_(self.saved.folder.read_piece(piece))",
        "self.saved.folder.read_piece(piece)",
        _PYTHON,
    ),
    _package(
        "save a compiled module under names of its wrapper",
        "checkpoint.py",
        '            name = name.replace(wrapper, "")\n',
        "            pass\n",
        "interop/test_saved_models.py",
    ),
]
