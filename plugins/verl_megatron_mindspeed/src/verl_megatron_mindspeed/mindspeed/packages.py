"""The packages that patch Megatron for NPUs, and how each is called. Imports none of them."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Final

from verl_engine.contract.backend import DeclaredPatch
from verl_engine.contract.errors import PatchError

_TESTED_COMMIT: Final = "e4772499f7eb9fa9a68919dd1eaddef00e915b2d"
"""Of MindSpeed's branch core_r0.16.0."""
_SPLIT: Final = (0, 17)
"""From this Megatron-core on patches and layers are packages of their own, which MindSpeed needs."""


@dataclass(frozen=True, slots=True)
class AdaptorPackage:
    """One such package."""

    name: str
    """As in the config: its top-level module."""
    module: str
    """Patches when it is imported, and has ``repatch``."""
    arguments: str
    """Module with ``get_full_args``, the namespace that patches follow, and ``get_mindspeed_args``, which has the
    defaults."""
    registries: tuple[str, ...]
    """``module:Class`` with ``patches_info``: the patches by name. Those that are not imported have none."""


MINDSPEED: Final = AdaptorPackage(
    name="mindspeed",
    module="mindspeed.megatron_adaptor",
    arguments="mindspeed.args_utils",
    registries=(
        "mindspeed.patch_utils:MindSpeedPatchesManager",
        "megatron_adaptor.patches.patch_manager:PatchesManager",
    ),
)
MEGATRON_ADAPTOR: Final = AdaptorPackage(
    name="megatron_adaptor",
    module="megatron_adaptor",
    arguments="megatron_adaptor.utils.args_utils",
    registries=("megatron_adaptor.patches.patch_manager:PatchesManager",),
)
PACKAGES: Final = (MINDSPEED, MEGATRON_ADAPTOR)
PATCHES: Final = (
    DeclaredPatch(
        "megatron.core.transformer.transformer_config:TransformerConfig.__init__",
        "MindSpeed's layers look for its own arguments in Megatron's config",
        kept_by=("mindspeed", "megatron_adaptor"),
    ),
)
"""What preparation declares to the host. MindSpeed says itself what else it replaces, once it has."""


def choose_package(adaptor: str) -> AdaptorPackage:
    """Find the package that the config names, for ``auto`` the first installed; PatchError says how to install it."""
    wanted = [package for package in PACKAGES if adaptor in ("auto", package.name)]
    for package in wanted:
        if importlib.util.find_spec(package.name) is not None:
            return package
    names = [package.name for package in wanted]
    missing = f"{names[0]} is not installed" if len(names) == 1 else f"neither {' nor '.join(names)} is installed"
    raise PatchError(
        f"engine.device is an NPU, where Megatron runs only as patched by MindSpeed, and {missing} "
        f"(engine.mindspeed.adaptor={adaptor}). {how_to_install()}"
    )


def how_to_install() -> str:
    """Say how MindSpeed, and what it needs, is installed for the Megatron that is here."""
    major, minor = (version_of("megatron-core") or "0.16.1").split(".")[:2]
    branch = f"core_r{major}.{minor}.0"
    repositories = {"MindSpeed": branch}
    if (int(major), int(minor)) >= _SPLIT:
        repositories = {"MegatronAdaptor": branch, "TransformerEngineNPU": "main", **repositories}
    commit = f"; tested at MindSpeed's commit {_TESTED_COMMIT[:12]}" if branch == "core_r0.16.0" else ""
    steps = [
        f"git clone -b {name} https://gitcode.com/Ascend/{repository} && pip install -e ./{repository}"
        for repository, name in repositories.items()
    ]
    return (
        "Install from Ascend's source, in this order, at commits that you write down: pip install triton-ascend && "
        f"{' && '.join(steps)}{commit} (MindSpeed imports triton without asking for it; what is called mindspeed on "
        "package indexes is a placeholder that refuses to be installed)"
    )


def version_of(distribution: str) -> str | None:
    """Return a distribution's version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
