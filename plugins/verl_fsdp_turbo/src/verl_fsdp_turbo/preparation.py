"""What a process needs before the library may be imported in it: the library, and on the CPU a name for the device."""

import importlib
import os
from typing import Any, Final

from verl_engine.contract.backend import DeclaredPatch
from verl_engine.contract.errors import PluginImportError
from verl_fsdp_turbo.config import FsdpTurboConfig
from verl_fsdp_turbo.library import INSTALL, MODULE, require_library

_DEVICES: Final = f"{MODULE}.utils.device"
_PATCH: Final = DeclaredPatch(
    target=f"{_DEVICES}:get_accelerator_name",
    reason="the library looks for an NPU or GPU to make its meshes for, and fails where there is neither",
)


def declared_patches(config: FsdpTurboConfig) -> tuple[DeclaredPatch, ...]:
    """Say what `prepare_process` replaces: nothing but on the CPU."""
    return (_PATCH,) if _kind(config) == "cpu" else ()


def prepare_process(config: FsdpTurboConfig) -> None:
    """Check that the library is there, and on the CPU let it make its meshes there; see ``engine_prepare_process``.

    Raises:
        PluginError: the library is not there.
        PluginImportError: it cannot be imported.
    """
    require_library()
    if _kind(config) != "cpu":
        return
    try:
        module: Any = importlib.import_module(_DEVICES)
    except Exception as error:  # what is broken can raise anything
        raise PluginImportError(
            f"{_DEVICES} cannot be imported ({type(error).__name__}: {error}); this was written for:\n  {INSTALL}"
        ) from error
    module.get_accelerator_name = _cpu


def _cpu() -> str:
    """Stand in for the library's ``get_accelerator_name``."""
    return "cpu"


def _kind(config: FsdpTurboConfig) -> str:
    from verl_engine.engine.device import Device

    return Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", "0"))).kind
