"""Whether MindSpeed patched Megatron completely. It gives no error where Megatron was imported too early."""

import sys
from collections.abc import Sequence
from typing import Final

import torch

from verl_engine.contract.errors import PatchError
from verl_engine.patching.patches import record_patch
from verl_engine.patching.target import Target
from verl_megatron_mindspeed.mindspeed.packages import AdaptorPackage, how_to_install, version_of
from verl_megatron_mindspeed.mindspeed.patches import ForeignPatch
from verl_megatron_mindspeed.mindspeed.stale_names import fix_stale_names

_CONFIG_INIT: Final = Target("megatron.core.transformer.transformer_config", "TransformerConfig.__init__")
_DECIDE_AT_IMPORT: Final = ("megatron.core.extensions.transformer_engine", "megatron.core.models.gpt.gpt_layer_specs")
"""Modules with a flag HAVE_TE. A few others have one that stays false with MindSpeed: they ask for more than it has."""


def check_patches(package: AdaptorPackage, before: Sequence[ForeignPatch], patches: Sequence[ForeignPatch]) -> None:
    """Fix what can be fixed, check everything, and record the patches for `verl_engine.patching.patches.records`.

    `before` are the patches after the package's import, `patches` those after ``repatch``. PatchError names everything
    that is not patched.
    """
    faults = _not_in_place(patches) + _decided_without() + fix_stale_names(before, patches)
    if faults:
        versions = " and ".join(
            f"{name} {version_of(name) or 'of unknown version'}" for name in (package.name, "megatron-core")
        )
        raise PatchError(
            f"{package.module} left Megatron partly unpatched: {'; '.join(faults)}. Here are {versions}, which must "
            f"belong together. {how_to_install()}"
        )
    for patch in patches:
        if not patch.is_withdrawn:
            record_patch(patch.target, patch.original, patch.replacement, f"{package.name}: runs on NPUs")


def _not_in_place(patches: Sequence[ForeignPatch]) -> list[str]:
    is_wrapped = any(patch.target == _CONFIG_INIT and not patch.is_withdrawn for patch in patches)
    faults = [] if is_wrapped else [f"{_CONFIG_INIT} is not wrapped"]
    for patch in patches:
        if not patch.is_applied:
            faults.append(f"its patch of {patch.target} is not applied")
        elif not patch.is_in_place():
            faults.append(f"{patch.target} does not hold its patch")
    return faults


def _decided_without() -> list[str]:
    """Say what Megatron decided at its import as if neither Transformer Engine nor Apex had fakes."""
    faults = [
        f"{name}:HAVE_TE is not true"
        for name in _DECIDE_AT_IMPORT
        if getattr(sys.modules.get(name), "HAVE_TE", None) is not True
    ]
    adam = getattr(sys.modules.get("megatron.core.optimizer"), "Adam", None)
    if adam is None or adam in (torch.optim.AdamW, torch.optim.Adam):
        faults.append("megatron.core.optimizer:Adam is torch's")
    return faults
