"""Who still holds what MindSpeed replaced. MindSpeed changes names that are spelt alike, in modules, and no others.

Names that are taken while Megatron is being imported go stale even where MindSpeed comes first: it imports Megatron to
patch it. So what can be fixed is, and only the rest is a fault.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from types import FunctionType
from typing import Final

from verl_engine.contract.errors import PatchError
from verl_engine.patching.import_recorder import is_within
from verl_engine.patching.references import Reference, find_references, inner_function
from verl_engine.patching.target import ABSENT, Target
from verl_megatron_mindspeed.mindspeed.patches import ForeignPatch

_FRAMEWORK: Final = "megatron"
_KEEPERS: Final = ("mindspeed", "megatron_adaptor")
"""They keep originals on purpose: their wrappers call them."""


def fix_stale_names(before: Sequence[ForeignPatch], patches: Sequence[ForeignPatch]) -> list[str]:
    """Put the replacements where originals, or those of an earlier round, are held; return what cannot be changed."""
    for reference, target in _stale_names(before, patches):
        _fix(reference, target.get())
    return [f"{reference} still holds the original of {target}" for reference, target in _stale_names(before, patches)]


def _stale_names(before: Sequence[ForeignPatch], patches: Sequence[ForeignPatch]) -> list[tuple[Reference, Target]]:
    current = {id(inner_function(patch.replacement)) for patch in patches}
    held: list[tuple[object, Target]] = [
        (patch.original, patch.target) for patch in patches if patch.original is not ABSENT and not patch.is_withdrawn
    ]
    held += [
        (patch.replacement, patch.target)
        for patch in before
        if id(inner_function(patch.replacement)) not in current and _is_keepers(patch.replacement)
    ]
    targets: dict[int, list[tuple[object, Target]]] = defaultdict(list)
    for former, target in held:
        for same in {id(former): former, id(inner_function(former)): inner_function(former)}.values():
            targets[id(same)].append((former, target))
    found = []
    for reference in find_references([former for former, _ in held], [patch.replacement for patch in patches]):
        is_kept = any(is_within(reference.module, keeper) for keeper in _KEEPERS) or _is_own_cell(reference)
        stale = [name for former, name in targets[id(reference.held)] if _is_stale(reference, former, name)]
        if stale and not is_kept:
            found.append((reference, stale[0]))
    return found


def _is_stale(reference: Reference, former: object, target: Target) -> bool:
    """Whether a place should follow a name.

    What was replaced under a name that only borrowed it, such as a module's choice of a norm, is itself still good: the
    class stays current where it was defined, and under other names. And what torch or the standard library hold of
    themselves is theirs; Megatron should have taken the replacement.
    """
    if not is_within(target.module, _FRAMEWORK) and not _is_keepers(former):
        return is_within(reference.module, _FRAMEWORK)
    is_at_home = getattr(inner_function(former), "__module__", None) == target.module
    return is_at_home or _is_keepers(former) or reference.place == target.path.rpartition(".")[2]


def _is_own_cell(reference: Reference) -> bool:
    owner, is_method, _ = reference.place.partition(".")
    return bool(is_method) and vars(sys.modules[reference.module]).get(owner) is reference.held


def _is_keepers(value: object) -> bool:
    """Whether MindSpeed defined it; a wrapper bears the name and module of what it wraps."""
    inner = inner_function(value)
    names = inner.__globals__ if isinstance(inner, FunctionType) else {}
    home = names.get("__name__", getattr(inner, "__module__", None))
    return isinstance(home, str) and any(is_within(home, keeper) for keeper in _KEEPERS)


def _fix(reference: Reference, replacement: object) -> None:
    """Change a place if that is possible; a tuple of a module, such as of classes for isinstance, is made anew."""
    try:
        reference.replace(replacement)
    except PatchError:
        module = sys.modules[reference.module]
        name = reference.place.partition("[")[0]
        entries = vars(module).get(name)
        if type(entries) is tuple:
            setattr(module, name, tuple(replacement if entry is reference.held else entry for entry in entries))
