"""The places in the source of a loaded module, or of Python's start-up files, that import a certain module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from verl_engine.host.preparation.import_statements import ImportStatement, import_statements
from verl_engine.host.preparation.module_source import module_source, start_up_lines, stored_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

MAIN: Final = "__main__"


class ImportSite(NamedTuple):
    """A place in the code that imports a module."""

    importer: str
    """A module's name, or ``Python's start-up``."""
    file: str
    line: int
    runs_at_import: bool = True
    """False inside a function, which may never have been called."""

    def __str__(self) -> str:
        """Show it as messages do."""
        return f"{self.importer} ({self.file}, line {self.line})"


def is_within(name: str, root: str) -> bool:
    """Whether a module is ``root`` or below it."""
    return name == root or name.startswith(f"{root}.")


def import_sites(key: str, module: ModuleType, name: str) -> Iterator[ImportSite]:
    """Find where a module's source imports another.

    Args:
        key: of the module in ``sys.modules``.
        module: the module.
        name: what it may import; with anything below it.
    """
    source = module_source(key, module, name.rpartition(".")[2])
    if source is None:
        return
    names = stored_names(module)
    package = names.get("__package__") or (key if "__path__" in names else key.rpartition(".")[0])
    for statement in import_statements(source.text, package, is_main=key == MAIN):
        if _imports(statement, name):
            yield ImportSite(key, source.file, statement.line, statement.runs_at_import)


def sites_at_start_up(name: str) -> list[ImportSite]:
    """Find the first line of a ``.pth`` file that imports a module."""
    for file, number, line in start_up_lines(name.rpartition(".")[2]):
        if any(_imports(statement, name) for statement in import_statements(line, "")):
            return [ImportSite("Python's start-up", file, number)]
    return []


def _imports(statement: ImportStatement, name: str) -> bool:
    return any(is_within(module, name) for module in statement.modules)
