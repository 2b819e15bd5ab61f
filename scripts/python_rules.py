"""The rules for Python files: short functions with few parameters, and imports that go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

LONGEST = 60
MOST = 6

#: Functions that may have more parameters, with the reason.
EXCEPT = {
    ("python/shardwise/_fully_shard.py", "fully_shard"): "torch's signature",
    ("python/shardwise/_estimate.py", "estimate_memory"): "public: what fully_shard() takes, and what a cluster is",
    ("python/shardwise/_estimate.py", "estimate_time"): "public: the links of a cluster, and what computes",
    ("python/shardwise/checkpoint.py", "load"): "public: what is loaded, and what is allowed",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_problems(name: str, text: str) -> Iterator[str]:
    """Checks each function's lines (without its docstring) and parameters (without `self`)."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, Function):
            continue
        lines = _lines(function) - (_lines(function.body[0]) if ast.get_docstring(function) else 0)
        if lines > LONGEST:
            yield f"line {function.lineno}: {function.name}() has {lines} lines: over {LONGEST}"
        taken = function.args
        parameters = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
        count = len([each for each in parameters if each not in ("self", "cls")])
        if count > MOST and (name, function.name) not in EXCEPT:
            yield f"line {function.lineno}: {function.name}() takes {count} parameters: over {MOST}"


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def imports(package: str, module: str, text: str, modules: set[str]) -> set[str]:
    """The modules of `package` that one of them imports anywhere: in functions, by name, or only for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # importlib.import_module() gets such a text
    return {each for each in modules - {module} if f"{package}.{each}" in found}


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, with the first repeated at the end; empty if there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for name in sorted(arrows.get(path[-1], set()) - done):
            if name in path:
                return [*path[path.index(name) :], name]
            if found := search([*path, name]):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(arrows) if name not in done and (found := search([name]))), [])


def circle_problems(package: Path) -> Iterator[str]:
    """Finds import circles among the package's modules, without the package itself, which is imported before them."""
    texts = {file.stem: file.read_text() for file in package.glob("*.py") if file.stem != "__init__"}
    found = circle({name: imports(package.name, name, text, set(texts)) for name, text in texts.items()})
    if found:
        yield f"{package.name}: modules import each other in a circle: {' -> '.join(found)}"
