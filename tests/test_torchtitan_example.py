"""The engine in examples/ is what somebody outside can write: short, of public names only. nox -s outside runs it."""

from __future__ import annotations

import ast

from tests.repository import ROOT
from tests.test_backend_tutorial import lines_of_code

FILES = sorted((ROOT / "examples" / "torchtitan_engine").rglob("*.py"))


def test_it_is_short() -> None:
    assert len(FILES) == 5
    assert sum(lines_of_code(path.read_text(encoding="utf-8")) for path in FILES) <= 180


def test_it_takes_nothing_but_public_names() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("verl")} == {"verl_engine"}
