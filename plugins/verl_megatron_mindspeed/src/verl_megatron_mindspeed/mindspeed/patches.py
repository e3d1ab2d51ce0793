"""What MindSpeed's own registry says: which names it replaced, by what, and what was there before."""

import inspect
import sys
from dataclasses import dataclass

from verl_engine.patching.references import inner_function
from verl_engine.patching.target import ABSENT, Target
from verl_megatron_mindspeed.mindspeed.packages import AdaptorPackage


@dataclass(frozen=True, slots=True)
class ForeignPatch:
    """One patch of MindSpeed's, as its registry has it."""

    target: Target
    original: object
    """ABSENT where there was nothing, as in the fakes for packages that are not installed."""
    replacement: object
    is_applied: bool
    owner: object
    """The module or class that it was put into; a class may have been replaced itself since."""

    @property
    def is_withdrawn(self) -> bool:
        """Whether the arguments ask for it no longer: then MindSpeed applies the original."""
        return self.replacement is self.original

    def is_in_place(self) -> bool:
        """Whether the name holds the replacement, in its module or in the class that it was put into."""
        name = self.target.path.rpartition(".")[2]
        stored = (self.target.get(), inspect.getattr_static(self.owner, name, ABSENT))
        return any(self.replacement is same for value in stored for same in (value, inner_function(value)))


def read_patches(package: AdaptorPackage) -> list[ForeignPatch]:
    """List the patches in the registries of a package that is imported, in the order in which it applied them."""
    found = []
    for registry in package.registries:
        module, _, name = registry.partition(":")
        if module not in sys.modules:
            continue
        for dotted, patch in getattr(sys.modules[module], name).patches_info.items():
            target = _target(dotted)
            if target is not None:
                original = ABSENT if patch.orig_func is None else patch.orig_func
                is_applied = bool(patch.is_applied)
                found.append(ForeignPatch(target, original, patch.final_patch_func, is_applied, patch.orig_module))
    return found


def _target(dotted: str) -> Target | None:
    """Split a name after its module; None where it is a module itself, made up by MindSpeed.

    A module that is not imported is one of which MindSpeed has not applied a patch yet.
    """
    parts = dotted.split(".")
    if dotted in sys.modules:
        return None
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if module in sys.modules:
            return Target(module, ".".join(parts[length:]))
    return Target(".".join(parts[:-1]), parts[-1])
