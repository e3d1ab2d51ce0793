"""Rules that keep the code readable; CONTRIBUTING.md gives the reasons."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.repository import PACKAGES, ROOT, python_files, source_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_DEPTH = 3
"""Of inheritance among classes of ours."""
DRAWERS = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
# Folders of one machine or person have no place in a file that all share.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:root|work|home/\w+)/")


def test_there_are_files() -> None:
    assert len(source_files()) > 20


def test_no_file_is_a_drawer() -> None:
    assert [name(path) for path in python_files() if path.name in DRAWERS] == []


def test_no_file_is_too_long() -> None:
    too_long = {name(path): lines for path in python_files() if (lines := read(path).count("\n")) > MAX_FILE_LINES}
    assert too_long == {}


def test_no_function_is_too_long() -> None:
    too_long = {
        f"{name(path)}: {function.name}": lines
        for path in python_files()
        for function in functions(path)
        if (lines := (function.end_lineno or function.lineno) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_no_file_names_a_path_of_one_machine() -> None:
    documents = [path for folder in ("docs", "core", "plugins") for path in (ROOT / folder).rglob("*.md")]
    templates = ROOT.glob("core/src/**/*.template")
    jobs = [path for folder in ("examples", "recipes") for path in (ROOT / folder).glob("*.yaml")]
    texts = [*python_files(), *documents, *templates, *ROOT.glob("*.md"), *jobs]
    assert [name(path) for path in texts if MACHINE_PATHS.search(read(path))] == []


@pytest.mark.fault(21)
def test_nothing_asks_whether_code_of_a_model_folder_may_run() -> None:
    """transformers asks on the terminal, unless it is told."""
    shipped = [path for path in python_files() if "tests" not in path.parts]
    loading = re.compile(r"(?:Auto\w+|auto_class\(.*\)|kind\))\.from_(?:pretrained|config)$")
    calls = [
        (path, call)
        for path in shipped
        for call in ast.walk(ast.parse(read(path)))
        if isinstance(call, ast.Call) and loading.search(ast.unparse(call.func))
    ]
    assert len(calls) > 10
    told = {"trust_remote_code": "False"}
    assert [
        f"{name(path)}: {ast.unparse(call)}"
        for path, call in calls
        if not told.items() <= {word.arg: ast.unparse(word.value) for word in call.keywords}.items()
    ] == []


@pytest.mark.parametrize("first", ["Engine", "EngineConfig"])
def test_engines_and_their_configs_are_made_of_parts_and_not_by_long_inheritance(first: str) -> None:
    bases = {node.name: [ast.unparse(base) for base in node.bases] for path in source_files() for node in classes(path)}

    def depth(kind: str) -> int:
        return 1 + max(map(depth, bases[kind]), default=0) if kind in bases else 0

    def is_derived(kind: str) -> bool:
        return kind == first or any(map(is_derived, bases.get(kind, [])))

    depths = {kind: depth(kind) for kind in bases if is_derived(kind)}
    assert len(depths) > 3
    assert max(depths.values()) == MAX_DEPTH, depths


def test_every_error_says_what_it_means() -> None:
    errors = [node for path in source_files() for node in classes(path) if node.name.endswith("Error")]
    assert errors
    assert [error.name for error in errors if not ast.get_docstring(error)] == []


def test_every_error_is_in_the_tree_of_engine_errors() -> None:
    # What the conformance kit raises is a failed assertion, or thrown on purpose to see what an engine makes of it.
    paths = [path for path in source_files() if "testing" not in path.parts]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for path in paths for node in classes(path)}

    def is_engine_error(name: str) -> bool:
        return name == "EngineError" or any(is_engine_error(base) for base in bases.get(name, ()))

    errors = [error for error in bases if error.endswith("Error") and error != "EngineError"]
    assert [error for error in errors if not is_engine_error(error)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_is_typed_and_carries_its_licence(package: Path) -> None:
    assert read(package / "LICENSE") == read(ROOT / "LICENSE")
    assert (package / "README.md").stat().st_size > 200
    [source] = (package / "src").iterdir()
    assert (source / "py.typed").exists()


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = ast.walk(ast.parse(read(path)))
    return (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.ClassDef))
