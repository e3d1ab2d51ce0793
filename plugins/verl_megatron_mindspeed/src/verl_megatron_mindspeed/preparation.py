"""What a process needs before Megatron may be imported in it, by the kind of its device. Imports no torch by itself."""

from verl_engine.contract.backend import DeclaredPatch
from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.mindspeed_config import MindSpeedConfig


def declared_patches(config: MegatronConfig) -> tuple[DeclaredPatch, ...]:
    """Say what `prepare_process` replaces, for the host, which checks that it did.

    The host asks in the process that it is about to prepare, so ``device: auto`` is as certain here as it is there.
    """
    kind = _found_kind("auto") if config.device == "auto" else config.device  # looking for one imports torch
    if kind == "cpu":
        from verl_megatron_mindspeed.cpu_support.patch_list import PATCHES

        return PATCHES
    if kind == "npu":
        from verl_megatron_mindspeed.mindspeed.packages import PATCHES as NPU_PATCHES

        return NPU_PATCHES
    return ()


def prepare_process(config: MegatronConfig) -> None:
    """Patch what needs patching; see ``engine_prepare_process``.

    Raises:
        ConfigError: there is no such device, or MindSpeed is configured for another.
        PatchError: MindSpeed is missing on an NPU, or did not patch all that it should.
    """
    kind = _found_kind(config.device)
    if kind != "npu" and config.mindspeed != MindSpeedConfig():
        raise ConfigError(
            f"engine.mindspeed is for NPUs, and engine.device={config.device} is {kind} here; leave it out"
        )
    if kind == "cpu":
        from verl_megatron_mindspeed.cpu_support.install import install

        install()
    elif kind == "npu":
        from verl_megatron_mindspeed.mindspeed.adaptor import apply

        apply(config)


def _found_kind(device: str) -> str:
    from verl_engine.engine.device import Device

    return Device.resolve(device).kind
