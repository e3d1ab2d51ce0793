"""The ``engine`` section of a job: what all backends share. Each backend adds its own fields by subclassing."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl_engine.contract.bounded import Bytes, Count, CountOrZero, NonNegative, Positive, Ranks, Seed, Threads
from verl_engine.contract.strict_model import STRICT, StrictModel, strict_schema


class LoraConfig(StrictModel):
    """Train low-rank adapters and leave the model's own weights as they are (Hu et al. 2021)."""

    rank: Ranks = 16
    """Inner dim of the adapters."""
    alpha: Positive = 32.0
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an adapter's input, in train mode."""
    target_modules: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Names, or ends of names, of the layers that get an adapter, such as ``q_proj``; ``all-linear`` means every linear
    layer but the output layer."""


class EngineConfig(BaseModel):
    """Fields that every backend understands."""

    model_config = ConfigDict(frozen=True, **STRICT)
    __get_pydantic_core_schema__ = classmethod(strict_schema)

    backend: str
    """Name of the engine backend, as ``verl-engine backends`` lists it."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where the model runs; ``auto`` takes an NPU or GPU where there is one, else the CPU."""
    num_threads: Threads = 1
    """CPU threads of each rank. One by default: ranks that share cores slow each other down with more."""
    seed: Seed = 0
    """Seeds each rank's random numbers (dropout and the like)."""
    dropout: Literal["off", "model"] = "off"
    """Dropout of the model in training: none, or what its ``config.json`` says (``model``), with other noise that the
    model has in train mode. Off by default: RL compares the probabilities of tokens with those they were drawn with,
    which dropout would change, and language models of today are trained without. ``lora.dropout`` is apart from it."""
    observers: tuple[str, ...] = ()
    """Observers to wrap around the engine's hooks, by name, the last one outermost; ``timing`` adds the time that each
    hook takes to the metrics. None is imported unless it is named here."""

    head: Literal["language_model", "value"] = "language_model"
    """What the model ends in: ``language_model`` gives the log-prob of each token, ``value`` one number for the state
    before it (a critic; a new head where the model folder has none; for loops of your own, jobs refuse it)."""
    forward_only: bool = False
    """Neither gradients nor optimizer: for a reference policy. Training such an engine is refused, and so is a job with
    one: a job makes the one that its algorithm needs itself."""
    entropy: Literal["off", "value", "gradient"] = "off"
    """Whether the entropy of each token's distribution is computed too: without gradient (``value``, a metric of RL
    jobs), or with one (``gradient``, for an entropy bonus). Supervised jobs refuse it."""
    router_replay: bool = False
    """Run tokens through the experts that their sequences bring in the field ``routed_experts``, weighted by the
    model's own routers, and say through which tokens went in a forward without gradient. For models with a mixture of
    experts. In an RL job the rollout engine gives the experts; supervised jobs refuse it."""
    lora: LoraConfig | None = None
    """Train adapters instead of the whole model; exports are merged weights."""
    snapshot_memory: Literal["private", "shared"] = "private"
    """Where snapshots of weights on the CPU lie: ``shared`` lets other processes of this machine map them
    without a copy."""
    snapshot_limit_bytes: Bytes | None = None
    """How much all snapshots of a rank may take together; by default as much as there is."""

    learning_rate: Positive = 1e-6
    """Peak learning rate. The default suits RL on a pretrained model; supervised training takes about ten times it."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warm-up: stay, or fall to ``min_lr_ratio`` times the peak at ``total_steps``; ``wsd`` (warm-up,
    stable, decay) stays and falls linearly over the last ``decay_steps``."""
    decay_steps: Count | None = None
    """Optimizer steps over which ``wsd`` falls; by default the last tenth of ``total_steps``."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps over which the rate rises linearly to its peak."""
    total_steps: int | None = Field(default=None, ge=1, le=2**63 - 1)
    """Optimizer steps of the whole run; a falling schedule needs it. Jobs fill it in from their own length;
    the ``config.yaml`` of a job has that number, so set null there where the length changes."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where a falling schedule ends, as a fraction of the peak."""
    weight_decay: NonNegative = 0.0
    """Weight decay of the optimizer (AdamW's is decoupled), on parameters of two dims or more; ``decay_vectors`` adds
    the others."""
    decay_vectors: bool = False
    """Weight decay on parameters of one dim too: norms and biases. Not by default, as most recipes exclude them."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment, each in [0, 1)."""
    eps: Positive = 1e-8
    """AdamW's denominator term."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this L2 norm over all ranks."""
    max_skipped_steps: Count = 5
    """The job stops after so many optimizer steps in a row with a gradient that is not finite. In float16 an overflow
    that a lower loss scale may fix does not count: a fresh run may begin with a few."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both be in [0, 1)")
        if len(set(self.observers)) < len(self.observers):
            raise ValueError(f"observers={list(self.observers)} names one twice; name each once")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be below total_steps={self.total_steps}")
        if self.head == "value" and self.entropy != "off":
            raise ValueError(f"entropy={self.entropy} is of a language model's head, and head=value: set entropy=off")
        if self.lora is not None and self.forward_only:
            raise ValueError("lora is for training, and forward_only=true: an adapter that is not trained does nothing")
        if self.decay_steps is not None and self.lr_schedule != "wsd":
            raise ValueError(
                f"decay_steps={self.decay_steps} is for lr_schedule=wsd, and it is {self.lr_schedule}; set wsd, or "
                "leave decay_steps out"
            )
        if self.min_lr_ratio and self.lr_schedule == "constant":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio} is where a falling schedule ends, and lr_schedule=constant does not "
                "fall; set linear, cosine or wsd, or leave min_lr_ratio out"
            )
        if self.decay_steps and self.total_steps and self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} and warmup_steps={self.warmup_steps} together must not exceed "
                f"total_steps={self.total_steps}"
            )
        return self

    def required_features(self) -> tuple[str, ...]:
        """Name the features (see `FEATURES`) that this config asks for by fields that all backends share."""
        asked = {
            "value_head": self.head == "value",
            "forward_only": self.forward_only,
            "entropy": self.entropy != "off",
            "router_replay": self.router_replay,
            "lora": self.lora is not None,
            "dropout": self.dropout == "model",
        }
        return tuple(feature for feature, is_asked in asked.items() if is_asked)

    def data_parallel_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return the data-parallel rank of each rank of the world; ranks that split a model have the same.

        By default every rank has its own. Overridden by backends that split the model.
        """
        return tuple(range(world_size))

    def sequence_ranks(self, world_size: int) -> tuple[int, ...]:
        """Return, for each rank of the world, its index among those that split the tokens of the same sequences.

        Known before an engine is built; by default 0, as nobody does. Overridden by backends that split sequences.
        """
        return (0,) * world_size

    def ranks_with_outputs(self, world_size: int) -> tuple[bool, ...]:
        """Say for each rank of the world whether it computes outputs, and calls the loss; by default everywhere.

        Known before an engine is built. Elsewhere the loss is never called, and results come from the ranks where it
        is. Overridden by backends with pipelines.
        """
        return (True,) * world_size

    def validate_world(self, world_size: int) -> None:
        """Raise a ConfigError where ranks cannot be divided as configured; overridden by backends that divide them."""

    def resolved_framework_config(self, num_ranks: int) -> dict[str, Any] | None:
        """Say what the backend hands to a framework that has a config of its own; ``--dry-run`` prints it.

        Plain values, defaults and derived settings included; None where there is no such config. Overridden by backends
        that have one, without importing torch or the framework. A ConfigError as of `validate_world`.
        """
        del num_ranks
        return None
