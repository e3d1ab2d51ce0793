"""Undo the imports of a plugin that turned out not to be usable."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_engine.patching.import_recorder import is_within


@contextmanager
def forgetting_on_failure(module_name: str) -> Iterator[None]:
    """Forget what was imported of a plugin's top-level package meanwhile, if an exception ends it.

    So a second try, after the plugin was fixed in the same session, does not meet the halves of the first. Modules of
    other packages stay: they may be in use already.
    """
    root = module_name.partition(".")[0]
    before = set(sys.modules)
    try:
        yield
    except BaseException:
        for name in sorted(sys.modules.keys() - before, reverse=True):  # a child before its parent
            if is_within(name, root):
                _forget(name)
        importlib.invalidate_caches()  # what was missing may be there at the next try
        raise


def _forget(name: str) -> None:
    module = sys.modules.pop(name)
    parent_name, _, child = name.rpartition(".")
    parent = sys.modules.get(parent_name)
    if parent is not None and getattr(parent, child, None) is module:
        delattr(parent, child)
