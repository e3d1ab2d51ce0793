"""Takes new weights into a model in place, bucket by bucket, and knows which have come."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from verl_async.rollout.interface import Acknowledgement
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import combine_checksums, read_bucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from verl_async.rollout.interface import WeightTransport
    from verl_engine.engine.weights.bucket import BucketEntry, WeightBucket

_MAX_NAMED: Final = 8
"""Names in an error message; the rest is counted."""


class WeightReceiver:
    """Fills the parameters and persistent buffers of a model: what its state dict, and its Hugging Face folder, hold.

    Tied weights are one tensor under several names: any of the names fills it. Any rollout engine may use this in the
    process that holds its model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._version: int | None = None
        self._plan: Sequence[WeightBucket] = ()
        self._transport: WeightTransport
        self._checksums: list[int] = []

    @property
    def is_loading(self) -> bool:
        """Whether weights were begun that no commit has put in use."""
        return self._version is not None

    def begin(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Check a plan against the model, and expect its buckets from now on.

        Args:
            version: that the weights will have.
            plan: full tensors under the names of the Hugging Face folder, in the model's shapes and any float dtype.
            transport: gives their bytes.
        Raises:
            WeightsError: a name or shape that the model does not have, one that comes twice, or some are missing.
        """
        entries = [entry for bucket in plan for entry in bucket.entries]
        for entry in entries:
            self._check(entry)
        twice = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
        if twice:
            raise WeightsError(f"weights come twice in one plan: {_listed(twice)}; send each once")
        planned = {id(self._targets[entry.name]) for entry in entries}
        first_names = {id(target): name for name, target in reversed(self._targets.items())}
        missing = sorted(name for target, name in first_names.items() if target not in planned)
        if missing:
            raise WeightsError(
                f"{len(missing)} weights are missing from the plan: {_listed(missing)}; send all weights of the model"
            )
        transport.open()
        self._version, self._plan, self._transport, self._checksums = version, plan, transport, []

    @torch.no_grad()
    def load(self, handle: Any, checksum: int) -> None:
        """Copy the next bucket into the model, cast to its dtype and moved to its device.

        Raises:
            WeightsError: nothing was begun, all buckets have come, or other bytes arrived.
        """
        if self._version is None:
            raise WeightsError("a weight bucket came without begin_weights; begin a version first")
        if len(self._checksums) == len(self._plan):
            raise WeightsError(f"a weight bucket came beyond the {len(self._plan)} of the plan; send each once")
        buffer = self._transport.read(handle)
        for name, weight in read_bucket(buffer, self._plan[len(self._checksums)], checksum):
            self._targets[name].copy_(weight)
        self._checksums.append(checksum)

    def commit(self, version: int) -> Acknowledgement:
        """Check that every bucket has come, and return what the model now has.

        Raises:
            WeightsError: buckets are missing, or another version was begun; what came stays, and the rest may follow.
        """
        if version != self._version:
            raise WeightsError(f"commit_weights of version {version}, but begin_weights had {self._version}")
        missing = self._plan[len(self._checksums) :]
        if missing:
            names = [entry.name for bucket in missing for entry in bucket.entries]
            raise WeightsError(f"{len(names)} weights of version {version} were not loaded: {_listed(names)}")
        self._version = None
        return Acknowledgement(version, combine_checksums(self._checksums))

    def _check(self, entry: BucketEntry) -> None:
        target = self._targets.get(entry.name)
        if target is None:
            raise WeightsError(
                f"weight {entry.name!r} is not in the rollout model, which has {_listed(self._targets)}; "
                "trainer and rollout must load the same model folder"
            )
        if tuple(target.shape) != entry.shape:
            raise WeightsError(
                f"weight {entry.name!r} has shape {entry.shape}, the rollout model wants {tuple(target.shape)}; "
                "send full tensors, not shards, of the same model"
            )


def _listed(names: Iterable[str]) -> str:
    """Name the first few, and count the rest."""
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
