"""Patches when it is imported, and again in ``repatch``."""

import os
from typing import Any

import torch_npu.contrib.transfer_to_npu  # noqa: F401 - for what it does

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features import register_fakes, register_patches
from mindspeed.patch_utils import MindSpeedPatchesManager


def _patch(args: Any) -> None:
    register_fakes(MindSpeedPatchesManager)
    MindSpeedPatchesManager.apply_patches()  # before Megatron is imported for the others
    register_patches(MindSpeedPatchesManager, args)
    MindSpeedPatchesManager.apply_patches()


def repatch(args: dict[str, Any]) -> None:
    """Patch again, by the arguments there are and these."""
    MindSpeedPatchesManager.remove_patches()
    full = get_full_args()
    for name, value in args.items():
        setattr(full, name, value)
    _patch(full)
    if os.environ.get("FAKE_MINDSPEED") == "conflict":
        MindSpeedPatchesManager.register_patch("megatron.core.models.gpt.gpt_layer_specs.LNImpl", object)


if os.environ.get("FAKE_MINDSPEED") == "fail":
    raise ModuleNotFoundError("No module named 'triton'")
_patch(get_mindspeed_args())
