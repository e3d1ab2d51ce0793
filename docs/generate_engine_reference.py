"""Write docs/reference/engine.md from the docstrings of the classes that an engine is made of.

    python docs/generate_engine_reference.py

A test fails while the page differs from the docstrings.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import verl_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE: Final = Path(__file__).parent / "reference" / "engine.md"
CLASSES: Final = ("Engine", "ModuleEngine", "DataParallel", "PackedBatch", "TokenOutput", "OptimizerStep", "Sequence")
PARTS: Final = (
    "Device",
    "SegmentRun",
    "FullyShardedPasses",
    "GradientSlot",
    "LossScaler",
    "WeightSpec",
    "WeightShard",
    "EngineWeights",
    "Exported",
    "LowRank",
    "RenamedWeights",
    "ModelFiles",
)
FUNCTIONS: Final = ("output_from_logits", "adamw", "parameter_groups", "write_model_folder")
SECTIONS: Final = ("Args", "Returns", "Yields", "Raises")
INTRODUCTION: Final = """\
# Engine, ModuleEngine, PackedBatch, DataParallel

<!-- Written by docs/generate_engine_reference.py from the docstrings: change those, not this page. -->

What an engine is made of, all from `verl_engine`. [The hooks](hooks.md) say when each is called, and [write a
backend](../tutorial/write-a-backend.md) shows the smallest engine. T is the number of tokens of a micro-batch, L
that of a sequence.
"""
PARTS_INTRODUCTION: Final = """
# Parts of engines

What an engine may be put together from: its device, the passes of a model under `fully_shard`, a loss scale, weights
under other names, AdamW, and a model folder.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")


def render() -> str:
    """Return the whole page."""
    classes, parts = ([_class(getattr(verl_engine, name)) for name in names] for names in (CLASSES, PARTS))
    functions = [_function(getattr(verl_engine, name)) for name in FUNCTIONS]
    return "".join([INTRODUCTION, *classes, PARTS_INTRODUCTION, *parts, *functions])


def _function(described: Callable[..., object]) -> str:
    tree = ast.parse(inspect.getsource(described)).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{described} is no function")
    call = f"{tree.name}({ast.unparse(tree.args)}) -> {_returned(tree)}"
    text = f"\n## `{tree.name}`\n\n```python\n{call}\n```\n\n{_prose(ast.get_docstring(tree))}"
    return text.rstrip("\n") + "\n"


def _class(described: type) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(described))).body[0]
    if not isinstance(tree, ast.ClassDef):
        raise TypeError(f"{described} is no class")
    bases = [base.__name__ for base in described.__bases__ if base.__name__ in {*CLASSES, *PARTS}]
    title = f"\n## `{tree.name}`\n\n" + (f"A subclass of `{bases[0]}`. " if bases else "")
    attributes, methods = list(_attributes(tree)), list(_methods(tree))
    table = "| attribute | what |\n|---|---|\n" + "\n".join(attributes) + "\n\n" if attributes else ""
    return (title + _prose(ast.get_docstring(tree)) + table + "".join(methods)).rstrip("\n") + "\n"


def _attributes(tree: ast.ClassDef) -> Iterator[str]:
    """Yield a row for each annotated attribute and each property."""
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, about = f"{node.target.id}: {ast.unparse(node.annotation)}", _text_of(following)
        elif isinstance(node, ast.FunctionDef) and "property" in _decorators(node):
            name, about = f"{node.name}: {_returned(node)}", ast.get_docstring(node) or ""
        else:
            continue
        if not name.startswith("_"):
            yield f"| `{_cell(name)}` | {_cell(about)} |"


def _methods(tree: ast.ClassDef) -> Iterator[str]:
    """Yield a section for each public method."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or "property" in _decorators(node):
            continue
        if node.name.startswith("_") and node.name != "__init__":
            continue
        abstract = "Must be overridden. " if "abstractmethod" in _decorators(node) else ""
        signature = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
        heading = tree.name if node.name == "__init__" else node.name
        call = f"{heading}({signature})" + (f" -> {_returned(node)}" if node.name != "__init__" else "")
        yield f"### `{heading}`\n\n```python\n{call}\n```\n\n{abstract}{_prose(ast.get_docstring(node))}"


def _returned(node: ast.FunctionDef) -> str:
    return ast.unparse(node.returns) if node.returns else "None"


def _prose(docstring: str | None) -> str:
    """Turn a docstring in Google's style into Markdown."""
    lines = []
    for line in _code(docstring or "").splitlines():
        section = re.fullmatch(rf"({'|'.join(SECTIONS)}):", line)
        if section:
            lines += ["", f"**{section[1]}**", ""]
        elif item := re.fullmatch(r"    (\w+): (.*)", line):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(line.strip() if not line.startswith("        ") else f"  {line.strip()}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n\n"


def _text_of(node: ast.stmt | None) -> str:
    """Return the docstring that follows an attribute."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def _code(text: str) -> str:
    return text.replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(_code(text).replace("|", "\\|").split())


if __name__ == "__main__":
    main()
