"""The ``engine`` section of the backends fsdp2 and fsdp, and what it shares with others. Imports no torch."""

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from verl_engine.contract.bounded import Count, CountOrZero, NonNegative, Ranks, divisors
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.strict_model import StrictModel


class ParameterGroup(StrictModel):
    """Optimizer settings for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched for in each parameter's Hugging Face name. The first group that matches counts."""
    learning_rate_scale: NonNegative = 1.0
    """Factor on the engine's learning rate; 0 keeps the parameters as they are."""
    weight_decay: NonNegative | None = None
    """In place of the engine's ``weight_decay``, for vectors too, whatever ``decay_vectors`` says."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
        return pattern


class ShardedConfig(EngineConfig):
    """What every backend understands that shards a Hugging Face model by PyTorch, whoever calls the sharding."""

    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What parameters are gathered and computed in. Master weights, gradient accumulation and reduction stay float32;
    ``float16`` adds a dynamic loss scale. A forward-only engine stores its weights in it too."""
    packing: bool = True
    """Lay the sequences of a micro-batch end to end with attention kept inside each. A model that cannot be packed (it
    has a recurrent state, or an attention of its own) gets one sequence per row, padded to the longest, and a log line
    says so. False does that with any model; slower on mixed lengths."""
    logit_chunk: Count = 256
    """Tokens whose logits exist at a time, float32: memory for log-probs is this times the vocabulary, not the whole
    micro-batch times the vocabulary."""
    gradient_sync: Literal["last_micro_batch", "every_micro_batch", "auto"] = "last_micro_batch"
    """When gradients are reduced over the ranks. At the last micro-batch only: least traffic, but each rank holds a
    whole float32 gradient (4 bytes per trained parameter) meanwhile. At each: 4 / ranks bytes per parameter, and one
    reduction for each. ``auto`` takes the first where it fits ``held_gradient_bytes``, and logs why."""
    held_gradient_bytes: int | None = Field(default=None, ge=0, le=2**50)
    """With ``gradient_sync: auto``: how much a rank may hold of not yet reduced gradients; by default a quarter of the
    device's memory."""
    sequence_parallel_size: Ranks = 1
    """Ranks that split the tokens of each micro-batch among them (Ulysses), for long sequences; it divides the number
    of ranks and of the model's attention heads. Needs packing."""

    optimizer: str = "torch.optim.AdamW"
    """Dotted path of the optimizer's class. AdamW gets ``betas``, ``eps`` and its fused form where there is one; any
    other only ``lr``, ``weight_decay`` per group, and ``optimizer_options``."""
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer's constructor."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Other settings for some parameters; the rest keeps the engine's."""

    @field_validator("optimizer")
    @classmethod
    def _is_dotted(cls, path: str) -> str:
        names = path.split(".")
        if len(names) == 1 or not all(name.isidentifier() for name in names):
            raise ValueError(f"optimizer={path!r} must be a dotted path such as torch.optim.AdamW")
        return path

    @model_validator(mode="after")
    def _check_sharded(self) -> Self:
        fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
        if self.optimizer == "torch.optim.AdamW":
            fields |= {"betas": "betas", "eps": "eps"}
        else:
            self._require_default_moments()
        for option in self.optimizer_options.keys() & fields.keys():
            raise ValueError(f"optimizer_options sets {option}; set engine.{fields[option]} instead")
        if self.sequence_parallel_size > 1 and not self.packing:
            raise ValueError(
                f"sequence_parallel_size={self.sequence_parallel_size} needs packing=true: padded rows are not split"
            )
        if self.held_gradient_bytes is not None and self.gradient_sync != "auto":
            raise ValueError(
                f"held_gradient_bytes={self.held_gradient_bytes} is for gradient_sync=auto, and it is "
                f"{self.gradient_sync}; set auto, or leave held_gradient_bytes out"
            )
        return self

    def _require_default_moments(self) -> None:
        """Refuse what would reach no optimizer but AdamW."""
        for name in ("betas", "eps"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={value} is for optimizer=torch.optim.AdamW, and it is {self.optimizer}; set "
                    f"optimizer_options.{name} if that knows it"
                )

    @property
    def stays_on_cpu(self) -> bool:
        """Whether weights, gradients and optimizer state lie on the CPU at all times."""
        return False

    def data_parallel_ranks(self, world_size: int) -> tuple[int, ...]:
        """Give neighbours that split a sequence the same data."""
        return tuple(rank // self.sequence_parallel_size for rank in range(world_size))

    def sequence_ranks(self, world_size: int) -> tuple[int, ...]:
        """Split sequences over neighbours."""
        return tuple(rank % self.sequence_parallel_size for rank in range(world_size))

    def validate_world(self, world_size: int) -> None:
        """Check that groups of ranks come out even; see the base class."""
        require_divisor("sequence_parallel_size", self.sequence_parallel_size, world_size)


def require_divisor(field: str, size: int, num_ranks: int) -> None:
    """Raise ConfigError where groups of ranks do not come out even."""
    if num_ranks % size:
        allowed = divisors(num_ranks)
        raise ConfigError(f"engine.{field}={size} does not divide the {num_ranks} ranks; use one of {allowed}")


class TorchSharding(StrictModel):
    """What the backends add that call PyTorch's sharding themselves."""

    shard_ranks: Ranks | None = None
    """Ranks that share one copy of the weights; it divides the number of ranks, and each further such group holds a
    copy of its own (HSDP). By default all ranks share one."""
    wrap: tuple[str, ...] = ()
    """Class names of the modules that are gathered and freed one by one. By default what the model's authors say must
    stay whole: its decoder layers."""
    activation_checkpointing: bool = False
    """Keep only each block's input for the backward and compute the rest again: less memory, about a third more
    compute."""
    compile: bool = False
    """Compile each block with torch.compile: the first step takes long, later ones are faster on accelerators."""
    compile_backend: str = "inductor"
    """torch.compile's backend; the same for all engines of a process."""

    @model_validator(mode="after")
    def _check_compile(self) -> Self:
        if self.compile and getattr(self, "router_replay", False):  # a field of what this is mixed into
            raise ValueError(
                "compile=true and router_replay=true: compiled blocks cannot be given experts; set one of them to false"
            )
        if self.compile_backend != "inductor" and not self.compile:
            raise ValueError(f"compile_backend={self.compile_backend} is for compile=true, and it is false")
        return self


class Fsdp2Config(TorchSharding, ShardedConfig):
    """PyTorch ``fully_shard`` (FSDP2)."""

    backend: Literal["fsdp2"] = "fsdp2"
    """Fixed: this section is for ``fsdp2``."""
    reshard_after_forward: bool | Ranks = True
    """Free gathered parameters between forward and backward, and gather them again; false keeps them, which is faster
    and takes more memory. A number reshards to so many ranks only (those of one machine, usually); it divides the ranks
    that share a copy."""
    keep_unsharded: bool = False
    """Keep parameters gathered from the first micro-batch to the last: least traffic, and a whole copy in
    ``param_dtype`` on each rank meanwhile."""
    forward_prefetch: CountOrZero = 0
    """Blocks that are gathered ahead, in the forward, besides what fully_shard does by itself."""
    backward_prefetch: CountOrZero = 0
    """The same in the backward."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the CPU, and bring each block to the device when it is used. For
    models that do not fit otherwise; slow."""

    @property
    def stays_on_cpu(self) -> bool:
        """Whether ``cpu_offload`` was asked for."""
        return self.cpu_offload

    def validate_world(self, world_size: int) -> None:
        """Check that groups of ranks come out even, those to reshard to among them; see the base class."""
        require_divisor("shard_ranks", self.shard_ranks or 1, world_size)
        super().validate_world(world_size)
        number, sharing = self.reshard_after_forward, self.shard_ranks or world_size
        if not isinstance(number, bool) and sharing % number:
            raise ConfigError(
                f"engine.reshard_after_forward={number} does not divide the {sharing} ranks that share a copy of the "
                f"weights; use true, false or one of {divisors(sharing)}"
            )


class FsdpConfig(TorchSharding, ShardedConfig):
    """PyTorch ``FullyShardedDataParallel`` (FSDP1), for models and tools that need it; fsdp2 is the better default."""

    backend: Literal["fsdp"] = "fsdp"
    """Fixed: this section is for ``fsdp``."""
    gradient_sync: Literal["last_micro_batch", "every_micro_batch", "auto"] = "auto"
    """As for fsdp2, but FSDP1 accumulates unreduced gradients in ``param_dtype``: so ``last_micro_batch`` is refused
    with another one than float32, and ``auto`` then reduces at every micro-batch."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward (FULL_SHARD); false keeps them to the end of the backward, and through
    micro-batches whose gradients are unreduced (SHARD_GRAD_OP)."""
    forward_prefetch: bool = False
    """Gather the next block before the current one's forward, in the order of the first pass."""
    backward_prefetch: Literal["before", "after", "off"] = "before"
    """When the backward gathers the next block: before the current one's gradients, after, or when it is needed."""

    @model_validator(mode="after")
    def _check_fsdp(self) -> Self:
        if self.gradient_sync == "last_micro_batch" and self.param_dtype != "float32":
            raise ValueError(
                f"gradient_sync=last_micro_batch would accumulate gradients in param_dtype={self.param_dtype}; FSDP1 "
                "can accumulate in float32 only what it reduces: use auto or every_micro_batch, or backend=fsdp2"
            )
        return self

    def validate_world(self, world_size: int) -> None:
        """Check that groups of ranks come out even; see the base class."""
        require_divisor("shard_ranks", self.shard_ranks or 1, world_size)
        super().validate_world(world_size)
