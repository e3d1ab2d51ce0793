"""The import statements of a module's source, read without running it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_IMPORTING_CALLS = {"__import__", "import_module"}


class ImportStatement(NamedTuple):
    """One statement, with the modules that it imports or may import."""

    modules: tuple[str, ...]
    """Absolute names. ``from a import b`` gives ``a`` and ``a.b``: b may be a module or not."""
    line: int
    runs_at_import: bool
    """False inside a function, which may never be called."""


def import_statements(text: str, package: str, *, is_main: bool = False) -> Iterator[ImportStatement]:
    """Find the statements that import something, ``importlib.import_module`` and ``__import__`` included.

    Args:
        text: source of the module; where it does not parse, nothing is found.
        package: the module's ``__package__``, against which relative imports are resolved.
        is_main: whether it runs as a script, with what it does under ``if __name__ == "__main__"``.
    Returns:
        The statements from top to bottom. Those for type checkers only are left out.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield from _in(tree, package, is_main=is_main, runs=True)


def _in(node: ast.AST, package: str, *, is_main: bool, runs: bool) -> Iterator[ImportStatement]:
    for child in _children(node, is_main=is_main):
        modules = tuple(_imported(child, package))
        if modules:
            yield ImportStatement(modules, getattr(child, "lineno", 0), runs)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _in(child, package, is_main=is_main, runs=runs and not is_function)


def _children(node: ast.AST, *, is_main: bool) -> Iterator[ast.AST]:
    """Leave out the branch of an ``if`` that does not run."""
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        never = test.endswith("TYPE_CHECKING") or (not is_main and "__name__" in test and "__main__" in test)
        if never and not test.startswith("not "):
            yield from node.orelse
            return
    yield from ast.iter_child_nodes(node)


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node.module or "", node.level, package)
        if base:
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.args[0].value
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in _IMPORTING_CALLS and isinstance(name, str):
            level = len(name) - len(name.lstrip("."))
            yield _absolute(name.lstrip("."), level, package)


def _absolute(name: str, level: int, package: str) -> str:
    if level == 0:
        return name
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - level + 1])
    return f"{base}.{name}".strip(".")
