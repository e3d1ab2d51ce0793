"""Who imported a module: from what was seen since a backend was loaded, else from the sources of what is loaded.

Python moves a module to the end of ``sys.modules`` when its import ends. So whoever imported it either comes after it,
the innermost first, or runs still, as the script does. Of those whose source imports it when run, the first after it
is taken; if that one was imported by another that had imported the module itself in an earlier line, the other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from verl_engine.host.preparation.import_sites import MAIN, ImportSite, import_sites, is_within, sites_at_start_up
from verl_engine.host.preparation.import_witness import seen_importer
from verl_engine.host.preparation.module_source import stored_names

if TYPE_CHECKING:
    from types import ModuleType

_LONGEST_CHAIN: Final = 5
_MOST_POSSIBLE: Final = 3


def first_loaded(root: str) -> str | None:
    """Find a module that is loaded and is ``root`` or below it; ``root`` itself if it is."""
    found = [name for name, _ in _loaded() if is_within(name, root)]
    return root if root in found else next(iter(found), None)


def find_importers(name: str, idle: str = "") -> list[list[ImportSite]]:
    """Find who imported a module, who imported that one, and so on.

    Args:
        name: a module in ``sys.modules``.
        idle: a package whose functions are known not to have run.
    Returns:
        The direct importer first. Where none is sure, the last link has those that may have done it inside a function.
        Empty where no source tells, as when code without source imported it.
    """
    seen = seen_importer(name)
    if seen is not None:
        return [[seen]]
    chain: list[list[ImportSite]] = []
    current = name
    while len(chain) < _LONGEST_CHAIN:
        sites = _importers(current, idle)
        if not sites or sites in chain:
            break
        chain.append(sites)
        current = sites[0].importer
        if not sites[0].runs_at_import or current not in sys.modules or current == MAIN:
            break
    return _from_earlier_line(name, chain)


def describe_importers(name: str, idle: str = "") -> str:
    """Say in words who imported a module; the arguments are those of `find_importers`."""
    chain = find_importers(name, idle)
    if not chain:
        unknown = (
            "code whose source is not at hand or does not name it, such as an interactive session, exec(), a compiled "
            "module, or import_module() with a name that is made up"
        )
        return f"imported by {unknown}"
    return ", which was ".join(map(_describe_link, chain))


def _describe_link(sites: list[ImportSite]) -> str:
    perhaps = "" if sites[0].runs_at_import else "perhaps "
    return f"{perhaps}imported by {' or '.join(map(str, sites))}"


def _loaded() -> list[tuple[str, ModuleType]]:
    """The modules of this process; an entry of None is a name that nobody may import."""
    entries: list[tuple[str, ModuleType | None]] = list(sys.modules.items())
    return [(name, module) for name, module in entries if module is not None]


def _importers(name: str, idle: str) -> list[ImportSite]:
    """The one importer that is sure, or else those that may be."""
    possible: list[ImportSite] = []
    for key, module in _in_order_of_likelihood(name):
        for site in import_sites(key, module, name):
            if not site.runs_at_import:
                if not is_within(key, idle) and key not in (other.importer for other in possible):
                    possible.append(site)
            elif key == MAIN:  # it was there before Python's own start-up, which may have done it sooner
                return sites_at_start_up(name) or [site]
            else:
                return [site]
    # Inside a function: one of them was called, if nobody else did it.
    return sites_at_start_up(name) or possible[:_MOST_POSSIBLE]


def _in_order_of_likelihood(name: str) -> list[tuple[str, ModuleType]]:
    """Those that ended after it, those that run still (the innermost first), and those that ended before it."""
    modules = _loaded()
    position = next((index for index, (key, _) in enumerate(modules) if key == name), len(modules))
    after = [item for item in modules[position + 1 :] if not _is_running(*item)]
    running = [item for item in reversed(modules) if _is_running(*item)]
    before = [item for item in reversed(modules[:position]) if not _is_running(*item)]
    return [(key, module) for key, module in (*after, *running, *before) if not is_within(key, name)]


def _is_running(name: str, module: ModuleType) -> bool:
    return name == MAIN or getattr(stored_names(module).get("__spec__"), "_initializing", False) is True


def _from_earlier_line(name: str, chain: list[list[ImportSite]]) -> list[list[ImportSite]]:
    """Start at the outermost importer that had imported the module itself before the line that led to the others."""
    for index in range(len(chain) - 1, 0, -1):
        outer = chain[index][0]
        module = sys.modules.get(outer.importer)
        if module is None or not outer.runs_at_import:
            continue
        for site in import_sites(outer.importer, module, name):
            if site.runs_at_import and site.line < outer.line:
                return [[site], *chain[index + 1 :]]
    return chain
