"""Nothing blocks the event loop: whatever waits inside of an async function is awaited."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

import pytest

from tests.repository import ROOT, source_files

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKING: Final = frozenset(
    {
        "ray.get", "ray.wait", "time.sleep", "os.system", "os.waitpid", "asyncio.run", "concurrent.futures.wait",
        "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
        "urllib.request.urlopen", "socket.create_connection",
    }
)  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def blocking_calls(source: str) -> list[str]:
    """Name what blocks in async functions, with its line: a call of `BLOCKING`, or of a function beside it that does.

    What is only handed on, such as to `asyncio.to_thread`, is not called there.
    """
    tree = ast.parse(source)
    names = dict(_imported(tree))
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    blocks: dict[str, list[str]] = {
        function.name: [] for function in functions if isinstance(function, ast.FunctionDef)
    }
    while True:  # until no further function is found to call one that blocks
        known = {name for name, calls in blocks.items() if calls}
        for function in functions:
            if isinstance(function, ast.FunctionDef):
                blocks[function.name] += _blocking(function, names, known)
        if known == {name for name, calls in blocks.items() if calls}:
            break
    return [call for one in functions if isinstance(one, ast.AsyncFunctionDef) for call in _blocking(one, names, known)]


def _blocking(function: _Function, names: dict[str, str], known: set[str]) -> list[str]:
    found = []
    for node in _own_nodes(function):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            head, dot, tail = called.partition(".")
            full = names.get(head, head) + dot + tail
            if full in BLOCKING or called.removeprefix("self.") in known:
                found.append(f"{node.lineno}: {function.name} calls {called}")
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import gives, with what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield what a function runs itself: not the bodies of functions in it, which run where they are called."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, _Function | ast.Lambda):
            yield from _own_nodes(node)


def test_no_async_function_of_the_job_blocks() -> None:
    files = [path for path in source_files() if "verl_async" in path.parts]
    asynchronous = [path for path in files if "async def" in path.read_text(encoding="utf-8")]
    assert len(asynchronous) > 10
    found = {str(path.relative_to(ROOT)): blocking_calls(path.read_text(encoding="utf-8")) for path in asynchronous}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import ray\nasync def f(x):\n    return [ray.get(one) for one in x]", "3: f calls ray.get"),
        ("import ray as r\nasync def f(x):\n    if x:\n        r.wait(x)", "4: f calls r.wait"),
        ("from ray import get as take\nasync def f(x):\n    take(x)", "3: f calls take"),
        ("from time import sleep\nclass A:\n    async def f(self):\n        sleep(1)", "4: f calls sleep"),
        ("import subprocess as s\nasync def f():\n    with g(s.run([])):\n        pass", "3: f calls s.run"),
        ("import ray\ndef g(x):\n    h(x)\ndef h(x):\n    ray.get(x)\nasync def f(x):\n    g(x)", "7: f calls g"),
        ("import ray\ndef g(self):\n    ray.get(1)\nasync def f(self):\n    self.g()", "5: f calls self.g"),
    ],
)  # fmt: skip
def test_it_finds_what_blocks(source: str, line: str) -> None:
    assert blocking_calls(source) == [line]


@pytest.mark.parametrize(
    "source",
    [
        "import ray\ndef f(x):\n    return ray.get(x)",
        "import asyncio\nasync def f():\n    await asyncio.sleep(1)",
        "import asyncio, time\ndef g():\n    time.sleep(1)\nasync def f():\n    await asyncio.to_thread(g)",
        "import asyncio, time\nasync def f():\n    await asyncio.to_thread(lambda: time.sleep(1))",
        "async def f(settings):\n    return settings.get('ray')",
    ],
)
def test_it_leaves_alone_what_does_not_block(source: str) -> None:
    assert blocking_calls(source) == []
