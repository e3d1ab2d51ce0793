"""The ``engine`` section of a job: what all backends share. Each backend adds its own fields by subclassing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from verl_engine.contract.strict_model import StrictModel


class EngineConfig(StrictModel):
    """Fields that every backend understands."""

    backend: str
    """Name of the engine backend, as ``verl-engine backends`` lists it."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Where the model runs; ``auto`` takes an NPU or GPU where there is one, else the CPU."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. One by default: ranks that share cores slow each other down with more."""
    seed: int = Field(default=0, ge=0)
    """Seeds each rank's random numbers (dropout and the like)."""
    observers: tuple[str, ...] = ()
    """Observers to wrap around the engine's hooks, by name, the last one outermost; ``timing`` adds the time that each
    hook takes to the metrics. None is imported unless it is named here."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up: stay, or fall to ``min_lr_ratio`` times the peak at ``total_steps``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly to its peak."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; a falling schedule needs it. Jobs fill it in from their own length."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where a falling schedule ends, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, on parameters of two or more dims only (norms and biases are spared)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment, each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator term."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this L2 norm over all ranks."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """The job stops after so many optimizer steps in a row with a gradient that is not finite."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both be in [0, 1)")
        if len(set(self.observers)) < len(self.observers):
            raise ValueError(f"observers={list(self.observers)} names one twice; name each once")
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be below total_steps={self.total_steps}")
        return self

    def validate_world(self, world_size: int) -> None:
        """Check what needs the number of ranks; overridden by backends that split it.

        Raises:
            ConfigError: the ranks cannot be divided as configured.
        """
