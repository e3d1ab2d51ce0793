"""What a process needs before Megatron may be imported in it, by the kind of its device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl_engine.engine.device import Device

if TYPE_CHECKING:
    from verl_megatron_mindspeed.config import MegatronConfig


def prepare_process(config: MegatronConfig) -> None:
    """Patch what needs patching; see ``engine_prepare_process``.

    Raises:
        PatchError: MindSpeed is missing on an NPU, or did not patch all that it should.
    """
    kind = Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", "0"))).kind
    if kind == "cpu":
        from verl_megatron_mindspeed.cpu_support import install

        install()
    elif kind == "npu":
        from verl_megatron_mindspeed.mindspeed.adaptor import apply

        apply(config)
