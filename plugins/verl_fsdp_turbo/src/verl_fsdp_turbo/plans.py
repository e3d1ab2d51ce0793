"""The plans that the library is given, as sections of the config. Imports no torch.

The library drops keys that it does not know, and takes ``'false'`` for true. These sections do neither.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from verl_engine.contract.bounded import Count, CountOrZero, Ranks
from verl_engine.contract.strict_model import StrictModel
from verl_fsdp_turbo.patterns import ModulePattern

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def _dotted(path: str) -> str:
    if not _DOTTED.fullmatch(path):
        raise ValueError(f"{path!r} must be a dotted path such as package.module.function")
    return path


DottedPath = Annotated[str, AfterValidator(_dotted)]


class Plan(StrictModel):
    """A section; it says of the library's other keys who decides them."""

    decided_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Keys of the library that are no fields here, with the reason."""
    refused: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """By key a value that the library has and that is none here, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _explain(cls, data: object) -> object:
        if isinstance(data, Mapping):
            for key in cls.decided_elsewhere.keys() & data.keys():
                raise ValueError(f"{key} cannot be set here: {cls.decided_elsewhere[key]}; leave it out")
            for key, (value, reason) in cls.refused.items():
                if data.get(key) == value:
                    raise ValueError(f"{key}={value} is refused: {reason}")
        return data


class ModuleSharding(Plan):
    """How ``fully_shard`` treats the modules of a pattern."""

    decided_elsewhere: ClassVar[Mapping[str, str]] = {
        "shard_placement_fn": "it is a function, and each parameter is cut along its first dim",
        "mesh": "the parallel sizes decide it",
        "mp_policy": "engine.param_dtype decides it",
        "offload_policy": "engine.offload_policy decides it",
    }
    reshard_after_forward: bool | Ranks | None = None
    """Free gathered parameters between forward and backward: true, false, or the number of ranks that they are
    resharded to. By default freed for every module but the root."""

    def arguments(self) -> dict[str, Any]:
        """Return what the library hands on to ``fully_shard``."""
        return {} if self.reshard_after_forward is None else {"reshard_after_forward": self.reshard_after_forward}


class FsdpPlan(Plan):
    """What is sharded, module by module."""

    decided_elsewhere: ClassVar[Mapping[str, str]] = {
        "param_dtype": "engine.param_dtype decides it",
        "reduce_dtype": "gradients are always reduced in float32",
        "output_dtype": "a dtype for every module's output would not fit the next one's weights",
        "cast_forward_inputs": "inputs are always cast to engine.param_dtype",
        "cpu_offload": "engine.offload_policy and engine.forward_only decide it",
        "gradient_divide_factor": "it is the number of all ranks; other numbers give wrong gradients",
        "hook_modules": "it has no effect where PyTorch shards, and the library's own implementation is refused",
        "ignored_modules": "the library never averages the gradients of what it leaves out of FSDP, so the copies on "
        "the ranks would drift apart",
    }
    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "fsdp_implementation": (
            "custom",
            "it needs private parts of some torch releases, and unreduced gradients in it cannot be found; use native",
        )
    }
    apply_modules: dict[ModulePattern, ModuleSharding] | None = Field(default=None, min_length=1)
    """Patterns of the modules that are gathered and freed one by one, such as ``model.layers.{*}``, each with its
    settings (``{}`` for the defaults). By default the model's decoder layers. Each pattern must match."""
    pin_memory: bool = True
    """With weights on the CPU: keep them in pinned memory, for faster copies. No effect on the device ``cpu``."""
    num_to_forward_prefetch: CountOrZero = 0
    """Modules that are gathered ahead in the forward, besides what ``fully_shard`` does by itself."""
    num_to_backward_prefetch: CountOrZero = 0
    """The same in the backward."""
    fsdp_implementation: Literal["native"] = "native"
    """Who shards: PyTorch. The library's own implementation is refused."""


class ExpertPlan(Plan):
    """How the experts of a mixture-of-experts model are divided among ranks."""

    decided_elsewhere: ClassVar[Mapping[str, str]] = {
        "apply_efsdp_modules": "it equals apply_modules; the library's own default wraps the whole block around the "
        "experts, and the router is then not averaged over the ranks that divide experts",
        "gradient_divide_factor": "it is the number of all ranks; with the library's own default the experts' "
        "gradients are too large by the number of ranks that divide them",
        "fixed_router": "it sends tokens to experts by number, for measurements only",
        "moonep_config": "the dispatcher moonep is refused",
    }
    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "dispatcher": (
            "moonep",
            "experts are then outside FSDP, and nobody averages their gradients; use eager, fused, mc2 or domino",
        )
    }
    apply_modules: tuple[ModulePattern, ...] = ()
    """Patterns of the modules that hold all experts of a layer, such as ``model.layers.{*}.mlp.experts``."""
    dispatcher: Literal["eager", "fused", "mc2", "domino"] = "eager"
    """How tokens reach the experts of other ranks: ``eager`` runs everywhere; ``fused``, ``mc2`` and ``domino`` take
    operators of Ascend's. The library's ``moonep`` is refused."""


class UlyssesPatch(Plan):
    """Functions that are made to trade tokens for heads with the ranks that split a sequence."""

    refused: ClassVar[Mapping[str, tuple[str, str]]] = {
        "type": (
            "compressor_full_attention_transposed",
            "its layers take masks of their own, which are not made here; use full_attention or gated_delta_net",
        )
    }
    target_functions: tuple[DottedPath, ...] = Field(min_length=1)
    """Dotted paths, such as ``transformers.models.qwen3.modeling_qwen3.eager_attention_forward``."""
    type: Literal["full_attention", "gated_delta_net"]
    """What kind of layer the function computes. The library's ``compressor_full_attention_transposed`` is refused."""


class LossPatch(Plan):
    """Loss functions that are made to know that a rank has a part of the tokens."""

    target_functions: tuple[DottedPath, ...] = Field(min_length=1)
    """Dotted paths. The engine computes losses by itself, so these matter to a model's own loss only."""
    type: Literal["causal_lm_loss"] = "causal_lm_loss"
    """What kind of loss it is."""


class ContextPlan(Plan):
    """How ranks split the tokens of a sequence, with ``ulysses_parallel_size``."""

    decided_elsewhere: ClassVar[Mapping[str, str]] = {
        "ulysses_core_attention_function": "the library's wrapper swaps the wrong dims of what transformers' attention "
        "functions return: log-probs are silently wrong, and with fewer key-value heads it fails; use "
        "ulysses_function_patches, which newer releases of the library have",
        "ulysses_attention_type": "it belongs to ulysses_core_attention_function; use ulysses_function_patches",
        "ulysses_attn_output_transposed": "it belongs to ulysses_core_attention_function; use ulysses_function_patches",
        "kv_allgather_core_attention_function": "kv_allgather_parallel_size is refused",
        "kv_allgather_attention_type": "kv_allgather_parallel_size is refused",
    }
    ulysses_function_patches: tuple[UlyssesPatch, ...] = ()
    """The model's functions in which tokens meet; all of them, or tokens of other ranks are not seen."""
    loss_function_patches: tuple[LossPatch, ...] = ()
    """The model's loss functions."""
    tokens_split_by: Literal["engine", "model"] = "engine"
    """Who cuts a rank's part out of the tokens: the engine, or the model's own forward, replaced by ``module_patches``
    with one that does (for images, which must be merged first). ``model`` needs ``packing: false``, and so do models
    with a recurrent state, such as Qwen3.5, whoever cuts."""


class ChunkBatchPlan(Plan):
    """Modules that run a batch in parts, for a lower peak of memory."""

    chunk_mbs: Count = 1
    """Rows of a part."""
    apply_modules: tuple[ModulePattern, ...] = Field(min_length=1)
    """Patterns of the modules."""
    batch_dim: int = Field(default=0, ge=-8, le=7)
    """The dim that is cut."""
    chunk_arg_indexs: tuple[Annotated[int, Field(ge=0, le=255)], ...] = ()
    """Which positional arguments are cut (the library spells it so)."""
    chunk_kwarg_names: tuple[str, ...] = ()
    """Which named arguments are cut. All that have a row for each sequence belong here or above."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.chunk_arg_indexs and not self.chunk_kwarg_names:
            raise ValueError("chunk_arg_indexs and chunk_kwarg_names are both empty: say which arguments are cut")
        return self


class MemoryPlan(Plan):
    """Less memory for more time."""

    recompute: bool = False
    """Keep only the input of the modules of ``recompute_plan`` for the backward, and compute the rest again."""
    recompute_plan: tuple[ModulePattern, ...] = ()
    """Patterns; by default the model's decoder layers."""
    chunk_batch: ChunkBatchPlan | None = None
    """Run some modules on parts of the batch. Needs ``packing: false``: packed sequences are one row."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recompute_plan and not self.recompute:
            raise ValueError("recompute_plan is for recompute=true, and it is false")
        return self


class ModulePatch(Plan):
    """One function of a model in place of another."""

    target: DottedPath
    """What is replaced, such as ``transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5Model.forward``."""
    replacement: DottedPath
    """What takes its place."""
