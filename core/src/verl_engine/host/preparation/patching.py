"""Replace one name of a module, now or at its first import. The way for backends whose patches are their own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from verl_engine.contract.errors import PatchError
from verl_engine.host.preparation import patch_record
from verl_engine.host.preparation.aliases import find_aliases
from verl_engine.host.preparation.first_import import patch_on_import
from verl_engine.host.preparation.owner import current_owner, is_preparing
from verl_engine.host.preparation.targets import ABSENT, Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from verl_engine.host.preparation.patch_record import How


def patch(target: str, make: Callable[[Any], object]) -> None:
    """Replace what a name holds, right after its module's first import, or now if that is past.

    Call it in ``engine_prepare_process``. Each replacement is recorded; see
    `verl_engine.host.preparation.patch_record`. Where the module is imported already, others may have taken the
    original from it: a name in ``BackendSpec.patches`` is checked for that.

        patch("megatron.core.optimizer:Adam", lambda original: CpuAdam)

    Args:
        target: ``module:attribute`` or ``module:Class.method``.
        make: gets the original as it is stored in the module or class, and returns what to put there.
    Raises:
        PatchError: the name is not there or cannot be changed. At a later import it makes the import fail.
    """
    name = Target.parse(target)

    def apply(module: ModuleType) -> None:
        original = name.get_in(module)
        if original is ABSENT:
            raise PatchError(f"{name} is not there to be patched for {current_owner()}; is this another version of it?")
        replacement = make(original)
        name.set_in(module, replacement)
        how: How = "preparation" if is_preparing() else "first import"
        patch_record.note_patch(name, current_owner(), original, replacement, how)

    patch_on_import(name.module, apply)


def note_replaced(target: str, former: object) -> None:
    """Tell the host of an object that a patcher of someone else's put under a name and has replaced again.

    The host sees originals by itself. What a name held in between, it does not: a module that took that is stale too.

    Args:
        target: as for `patch`.
        former: what the name held.
    """
    patch_record.note_replaced(Target.parse(target), former)


def mend_aliases(target: str) -> list[str]:
    """Put what a name holds now into every place that still holds what it held before.

    For backends whose patcher replaces names only, and not what others took from them sooner. Places that the backend
    lists as ``kept_by``, such as its own wrappers, are not known here: call it for names that nobody keeps on purpose.

    Args:
        target: as for `patch`.
    Returns:
        The places that were mended.
    Raises:
        PatchError: one cannot be changed.
    """
    name = Target.parse(target)
    places = find_aliases(patch_record.replaced_objects(name))
    for alias in places:
        alias.replace(name.get())
    return list(map(str, places))


def undo(target: Target, *, is_shared: bool) -> None:
    """Put the oldest original back, also where the replacement was taken from the name, as far as that can be done.

    Args:
        target: the name.
        is_shared: whether the same object replaces other names too: then only places of the same name are its aliases.
    """
    originals, replacement = patch_record.replaced_objects(target), target.get()
    if not originals or replacement is ABSENT or replacement is originals[0]:
        return
    with contextlib.suppress(PatchError):  # the process is refused anyhow, with the error that led here
        target.set(originals[0])
    home = getattr(replacement, "__module__", None)
    name = target.path.rpartition(".")[2]
    for alias in find_aliases([replacement]):
        if alias.module != home and (not is_shared or alias.place.rpartition(".")[2] == name):
            with contextlib.suppress(PatchError):
                alias.replace(originals[0])
