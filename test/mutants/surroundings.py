"""What other people's programs do with wrapped modules and around them: casts, loads, patches, records, errors."""

from __future__ import annotations

from mutant import Mutant, python_mutants

_package = python_mutants("python/shardwise")
_front = python_mutants("csrc/python_front")
_bindings = python_mutants("csrc/bindings")

SURROUNDINGS = [
    Mutant(
        "start collectives with the lock of the caller's language",
        "csrc/comm/collectives/collectives.cpp",
        "      const base::WithoutCallerLock unlocked;\n      return call();",
        "      return call();",
        suites="FullyShardCustom.*",
    ),
    Mutant(
        "compute in any dtype that replicated members are cast to",
        "csrc/engine/unit.cpp",
        "    need_no_copies();\n",
        "",
        suites="CastsAfterWrapping.*",
    ),
    Mutant(
        "let a full parameter have the memory that somebody gave it",
        "csrc/engine/unit.cpp",
        "  need_own_memory();\n",
        "",
        languages=("C++", "Python"),
        suites="HeldTensors.*",
    ),
    Mutant(
        "leave memory given by to_empty() where it is not trained",
        "csrc/engine/unit_values.cpp",
        "    group::replace_data(tensor, at::zeros({}, options).expand(tensor.sizes()));\n  }\n"
        "  follow_parameters(/*takes_memory=*/true);",
        "    group::replace_data(tensor, at::zeros({}, options).expand(tensor.sizes()));\n  }",
        suites="HeldTensors.*",
    ),
    Mutant(
        "take memory that somebody may hold at the next use",
        "csrc/group/full_copies_shards.cpp",
        "    if (takes_memory || !is_piece ||",
        "    if (takes_memory || is_piece || !is_piece ||",
        suites="HeldTensors.*",
    ),
    Mutant(
        "see no gradient that was added to a leaf",
        "csrc/engine/gradient_sums.cpp",
        "  for (const auto& parameter : unit_.parameters()) parameter->take_leaf_gradient();\n",
        "",
        suites="LeafGradients.*",
    ),
    Mutant(
        "add up gradients of leaves in their own dtype",
        "csrc/group/parameter.cpp",
        "    pending_ = fresh_.to(sum_dtype_.value_or(fresh_.scalar_type()));",
        "    pending_ = fresh_.clone();",
        suites="LeafGradients.*",
    ),
    Mutant(
        "write a record over another rank's",
        "csrc/observe/record.cpp",
        "O_CREAT | O_EXCL | O_CLOEXEC",
        "O_CREAT | O_CLOEXEC",
        suites="Record.*",
    ),
    _front(
        "copy replicated parameters that have the dtype to compute in",
        "module_unit.cpp",
        "!tensor.extension && settings.shares(dtype, settings.full_dtype(dtype, given.full_dtype), mesh.device());",
        "values.dim() < 0;",
        "ranks/test_casts_after_wrapping.py",
    ),
    _front(
        "cast the outputs of a list where all of it ran",
        "module_unit.cpp",
        "  if (ends(module)) {\n",
        "  if (!ends(module)) return py::none();\n  {\n",
        "interop/test_interop_lists.py",
    ),
    _bindings(
        "make process groups where the program has them",
        "unit.cpp",
        "  .neighbours = neighbours.value_or(nullptr)});\n",
        "  (void)neighbours;\n",
        "interop/test_interop_threads.py",
    ),
    _bindings(
        "make one class of all errors in backward",
        "module.cpp",
        "  } catch (const shardwise::Error& error) {\n    PyErr_SetString(class_of(error), error.what());\n  }\n"
        "  python_error raised;",
        "  } catch (const shardwise::Error& error) {\n    PyErr_SetString(PyExc_RuntimeError, error.what());\n  }\n"
        "  python_error raised;",
        "ranks/test_peer_errors.py",
    ),
    _bindings(
        "leave errors of other extension modules to them",
        "module.cpp",
        "  py::register_exception_translator(translate);\n",
        "  (void)translate;\n",
        "ranks/test_peer_errors.py",
    ),
    _package(
        "put our classes below no abstract one",
        "_isinstance_shims.py",
        "class _Either(ABCMeta):",
        "class _Either(type):",
        "unit/test_install_patches.py",
    ),
    _package(
        "leave ours in torch's dictionary",
        "_install.py",
        "= _torchs(self._name) if is_ours else value",
        "= value",
        "unit/test_install_patches.py",
    ),
    _package(
        "take any g++ for one that shardwise is built with",
        "_abilities.py",
        "if found is None or found < OLDEST_GCC:",
        "if found is None:",
        "unit/test_doctor.py",
    ),
    _package(
        "let CMake find torch by itself",
        "__init__.py",
        "share' / 'cmake'};{_torchs}\"",
        "share' / 'cmake'}\"",
        "unit/test_import.py",
    ),
    _package(
        "draw whatever a file has",
        "_record_files.py",
        "        if type(found[name]) is not kind:",
        "        if found is None:",
        "unit/test_timeline.py",
    ),
    _package(
        "leave parameters with tensor parallelism on the meta device as they are",
        "_specs.py",
        "    if is_cast or parameter.is_meta:",
        "    if is_cast:",
        "ranks/test_fully_shard_state.py",
    ),
    _package(
        "cut tensors that are around others",
        "_parameters.py",
        "    if not has_memory(local) and not is_extended(local, name):",
        "    if local is None:",
        "ranks/test_wrapper_tensors.py",
    ),
]
