"""Source text of what runs in this process: modules, the command line's code, and start-up files."""

from __future__ import annotations

import sys
import tokenize
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType


class Source(NamedTuple):
    """Text with its origin."""

    file: str
    text: str


def stored_names(holder: object) -> Mapping[str, Any]:
    """Return what a module or class holds, without asking it: some make names, or import, when they are asked."""
    try:
        base: Any = type if issubclass(type(holder), type) else object
        names: Mapping[str, Any] = base.__getattribute__(holder, "__dict__")
    except AttributeError:  # no module at all: anything can be in sys.modules
        return {}
    return names


def module_source(name: str, module: ModuleType, word: str) -> Source | None:
    """Read the source of an imported module.

    Args:
        name: its key in ``sys.modules``.
        module: the module.
        word: the text must hold it; others are not decoded, for there are thousands.
    Returns:
        None for compiled modules, and where the word is not in it.
    """
    try:
        file = stored_names(module).get("__file__")
        if not isinstance(file, str):
            return _command_line(word) if name == "__main__" else None
        raw = _read(file) if file.endswith(".py") or name == "__main__" else None
        text = _decode(raw, word) if raw is not None else _ask_loader(name, module, word)
    except Exception:  # noqa: BLE001 - a stranger's module object or loader can do anything; this is only for a message
        return None
    return Source(file, text) if text is not None else None


def start_up_lines(word: str) -> Iterator[tuple[str, int, str]]:
    """Find the lines that Python runs at its start from ``.pth`` files.

    Args:
        word: the line must hold it.
    Returns:
        File, line number and code of each.
    """
    if sys.flags.no_site:
        return
    folders: list[object] = list(sys.path)
    for folder in folders:
        if not isinstance(folder, str) or not Path(folder).is_dir():
            continue
        for path in sorted(Path(folder).glob("*.pth")):
            for number, line in enumerate((_read(str(path)) or b"").decode("utf-8", "replace").splitlines(), 1):
                if line.startswith(("import ", "import\t")) and word in line:
                    yield str(path), number, line


def _read(file: str) -> bytes | None:
    try:
        return Path(file).read_bytes()
    except OSError:  # inside a zip file, or gone since
        return None


def _decode(raw: bytes, word: str) -> str | None:
    if word.encode() not in raw:
        return None
    encoding, _ = tokenize.detect_encoding(BytesIO(raw).readline)
    return raw.decode(encoding)


def _ask_loader(name: str, module: ModuleType, word: str) -> str | None:
    get_source = getattr(stored_names(module).get("__loader__"), "get_source", None)
    text = get_source(name) if get_source is not None else None
    return text if isinstance(text, str) and word in text else None


def _command_line(word: str) -> Source | None:
    """The code after ``python -c``."""
    for option, value in zip(sys.orig_argv[1:], sys.orig_argv[2:], strict=False):
        if not option.startswith("-"):
            break
        if option.endswith("c") and not option.startswith("--"):  # alone, or after other letters, such as -Ic
            return Source("<python -c>", value) if word in value else None
    return None
