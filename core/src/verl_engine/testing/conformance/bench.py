"""What a check finds on each rank: models, engines, and ways to compare ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.testing.conformance.check import SkipCheckError, Subject, require
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.gradient_probe import PROBE_SETTINGS, GradientProbe
from verl_engine.testing.conformance.reference import furthest_gradient


@dataclass(frozen=True)
class Bench:
    """What one rank works with; each phase of a check gets a new one."""

    subject: Subject
    rank: int
    world_size: int
    gaps: Mapping[str, str]
    """Features that the backend declares it lacks."""
    models: Path
    """Where tiny models are; shared by all checks."""
    folder: Path
    """Of this check alone; on every rank, and in all its phases, the same."""

    def model(self, kind: str = "plain") -> Path:
        """Return a tiny model's folder, written when it is first asked for.

        Kinds are ``plain``, ``other`` (with other weights), ``tied``, ``dropout``, ``buffered``, ``absolute`` (learnt
        positions), ``experts`` (a mixture of them in each layer) and ``critic`` (it ends in a value).
        """
        if kind == "buffered":
            import verl_engine.testing.buffered_model  # noqa: F401 - registers the model's type, on every rank

        folder = self.models / kind
        if self.rank == 0 and not folder.exists():
            partial = folder.with_name(f".{kind}")
            _write_model(partial, kind)
            partial.rename(folder)
        dist.barrier()
        return folder

    def driver(self, kind: str = "plain", **settings: Any) -> Driver:
        """Build an engine from a tiny model; unless told otherwise, one that draws dropout where train mode counts."""
        if kind in ("dropout", "buffered"):
            settings = {**self.with_dropout(), **settings}
        folder = self.model(kind)
        if kind in ("plain", "other"):
            return Driver(self.subject.section(**settings), folder, self.rank, self.world_size)
        found: Driver | None = None
        refusal = ""
        try:
            found = Driver(self.subject.section(**settings), folder, self.rank, self.world_size)
        except (ConfigError, ModelError) as error:
            refusal = str(error)
        self.require((found is None) == any(self.gather(refusal)), f"some ranks refuse the {kind} model")
        if found is None:
            raise SkipCheckError(f"the backend refuses the {kind} model that this takes: {refusal}")
        return found

    def with_dropout(self) -> dict[str, Any]:
        """Return the setting that has the model's dropout drawn in training; nothing where that is a gap."""
        return {} if "dropout" in self.gaps else {"dropout": "model"}

    def probe(self, kind: str = "plain", **settings: Any) -> GradientProbe:
        """Build an engine whose gradient can be read."""
        return GradientProbe(lambda: self.driver(kind, **{**PROBE_SETTINGS, **settings}), self.gaps)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order. Collectives: one."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def require(self, is_right: bool, message: str) -> None:
        """Fail on all ranks where something is wrong on one, so that none is left waiting. Collectives: one."""
        wrong = [rank for rank, is_ok in enumerate(self.gather(bool(is_right))) if not is_ok]
        where = "" if len(wrong) == self.world_size else f" (on rank {', '.join(map(str, wrong))})"
        require(not wrong, message + where)

    def require_same(
        self, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str, why: str = ""
    ) -> None:
        """Fail on all ranks where weights are not the same bit for bit; says how they differ. Collectives: one."""
        difference = differences(found, expected)
        self.require(difference == "none", f"{what}: {difference}{why}")

    def divide(self, driver: Driver, sequences: list[Sequence], num_micro_batches: int = 3) -> list[list[Sequence]]:
        """Return this rank's micro-batches of a global batch, of one sequence each where the backend takes no more."""
        return driver.micro_batches(sequences, len(sequences) if "packed_batches" in self.gaps else num_micro_batches)

    def require_gradient(
        self,
        found: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        what: str,
        tolerance: float = 1e-5,
    ) -> None:
        """Fail on all ranks where a gradient is off by more, relative to the largest entry; names the weight."""
        name, error = furthest_gradient(found, expected)
        self.require(error <= tolerance, f"{what} is off by {error:.3g}, relatively, most of all {name}'s")

    def setting_of(self, feature: str) -> dict[str, Any]:
        """Return the field that switches a feature on; the check fails where there is none, and no gap is declared."""
        from verl_engine.host.backend_host import BackendHost

        name, value = FEATURE_FIELDS[feature]
        fields = BackendHost.load(self.subject.backend).spec.config_class.model_fields
        require(
            name in fields,
            f"feature {feature!r} is switched on by engine.{name}={value}, but the config class has no field {name}; "
            "add it, or declare the gap",
        )
        return {name: value}


def _write_model(folder: Path, kind: str) -> None:
    from verl_engine.testing import tiny_models  # imports transformers
    from verl_engine.testing.buffered_model import write_buffered_model

    others: dict[str, Callable[[Path], Path]] = {
        "buffered": write_buffered_model,
        "absolute": tiny_models.write_absolute_position_model,
        "critic": tiny_models.write_tiny_critic,
        "experts": tiny_models.write_tiny_mixture,
    }
    if kind in others:
        others[kind](folder)
        return
    attention_dropout = 0.5 if kind == "dropout" else 0.0
    tiny_models.write_tiny_model(
        folder, tied=kind == "tied", seed=int(kind == "other"), attention_dropout=attention_dropout
    )


FEATURE_FIELDS = {
    "bf16": ("param_dtype", "bfloat16"),
    "fp16": ("param_dtype", "float16"),
    "every_micro_batch_sync": ("gradient_sync", "every_micro_batch"),
}
"""Which field of a config turns a feature on, and its value; the same in every backend that has it."""
