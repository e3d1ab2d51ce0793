"""Which names are replaced, by the arguments: some of each kind that the original replaces."""

import importlib
import inspect
from functools import wraps
from typing import Any

import torch

from mindspeed.args_utils import get_full_args

_FAKES = (
    "amp_C.multi_tensor_l2norm",
    "amp_C.multi_tensor_scale",
    "apex.multi_tensor_apply.multi_tensor_applier",
    "apex.optimizers.FusedSGD",
    "transformer_engine.common.recipe.DelayedScaling",
    "transformer_engine.pytorch.DotProductAttention",
    "transformer_engine.pytorch.GroupedLinear",
    "transformer_engine.pytorch.LayerNorm",
    "transformer_engine.pytorch.LayerNormLinear",
    "transformer_engine.pytorch.Linear",
    "transformer_engine.pytorch.distributed.CudaRNGStatesTracker",
    "transformer_engine.pytorch.distributed.activation_recompute_forward",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager",
    "transformer_engine.pytorch.fp8.fp8_autocast",
    "transformer_engine.pytorch.ops.FusibleOperation",
    "transformer_engine.pytorch.ops.GEGLU",
    "transformer_engine.pytorch.ops.GELU",
    "transformer_engine.pytorch.ops.ReGLU",
    "transformer_engine.pytorch.ops.ReLU",
    "transformer_engine.pytorch.ops.Sequential",
    "transformer_engine.pytorch.ops.SwiGLU",
    "transformer_engine.pytorch.tensor.QuantizedTensor",
)


class FusedAdam(torch.optim.AdamW):
    """The optimizer of the NPU."""


class TELinear(torch.nn.Module):
    """A layer of the NPU."""


def dummy_compile(*args: Any, **_: Any) -> Any:
    """Compile nothing."""
    return args[0] if args else lambda function: function


def version_wrapper(version: Any) -> Any:
    """There is a version of Transformer Engine."""

    @wraps(version)
    def wrapper(name: str) -> Any:
        return "2.2.0" if name == "transformer-engine" else version(name)

    return wrapper


def config_init_wrapper(init: Any) -> Any:
    """Take arguments as defaults of the config's fields, and the others as attributes."""

    @wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        values = {**vars(get_full_args()), **options}
        fields = inspect.signature(type(self)).parameters
        for name in values.keys() - fields.keys():
            setattr(self, name, values[name])
        init(self, *args, **{name: value for name, value in values.items() if name in fields})

    return wrapper


def config_post_init_wrapper(post_init: Any) -> Any:
    """Let the features validate each config that is made; some change it."""

    @wraps(post_init)
    def wrapper(self: Any) -> None:
        post_init(self)
        if getattr(self, "use_flash_attn", False) and self.sparse_mode not in (0, 2):
            raise AssertionError("When use_flash_attn, only supports sparse modes 0 and 2")
        if self.use_fusion_attn_v2:
            self.use_flash_attn = True

    return wrapper


def optimizer_wrapper(get: Any) -> Any:
    """Wrap without a change."""

    @wraps(get)
    def wrapper(*args: Any, **options: Any) -> Any:
        return get(*args, **options)

    return wrapper


def attention_forward(*_: Any, **__: Any) -> Any:
    """Attention by the NPU's kernel."""
    raise NotImplementedError


def invariant_attention_forward(*_: Any, **__: Any) -> Any:
    """Attention by flash-attn-npu."""
    raise NotImplementedError


class RingAttention(torch.nn.Module):
    """Attention over sequences that several ranks hold."""


def register_fakes(manager: Any) -> None:
    """What must be there before Megatron is imported."""
    manager.register_patch("importlib.metadata.version", version_wrapper)
    manager.register_patch("torch.compile", dummy_compile)
    manager.register_patch("apex.optimizers.FusedAdam", FusedAdam, create_dummy=True)
    for name in _FAKES:
        manager.register_patch(name, torch.nn.Module, create_dummy=True)


def register_patches(manager: Any, args: Any) -> None:
    """What is replaced in Megatron."""
    core = "megatron.core"
    attention = f"{core}.transformer.dot_product_attention.DotProductAttention"
    manager.register_patch(f"{core}.transformer.transformer_config.TransformerConfig.__init__", config_init_wrapper)
    manager.register_patch(
        f"{core}.transformer.transformer_config.TransformerConfig.__post_init__", config_post_init_wrapper
    )
    manager.register_patch(f"{core}.extensions.transformer_engine.TELinear", TELinear)
    manager.register_patch(f"{core}.models.gpt.gpt_layer_specs.LNImpl", torch.nn.RMSNorm)
    manager.register_patch(f"{core}.optimizer.get_megatron_optimizer", optimizer_wrapper)
    ranks = int(getattr(args, "context_parallel_size", 1))
    if ranks > 1:
        manager.register_patch(attention, RingAttention)
    if getattr(args, "use_flash_attn", False) and ranks == 1:
        manager.register_patch(f"{attention}.forward", attention_forward)
    if getattr(args, "fp8_format", None):
        importlib.import_module("megatron.training")
    if args.use_flash_attn_npu_batch_invariant:
        manager.register_patch(f"{attention}.forward", invariant_attention_forward)
