"""Full weights, and this rank's pieces of them, in and out of FSDP1's flat tensors.

Shape legend: O outputs and I inputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_engine.engine.base import WeightShard
from verl_engine.engine.weights.incoming import paired_shards, paired_weights
from verl_engine.engine.weights.module_weights import Exported, LowRank, merged, own_tensors
from verl_engine.engine.weights.shards import replicas_of, shared_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from verl_fsdp.fsdp1.flat_unit import FlatUnit
    from verl_fsdp.fsdp1.weight_table import WeightTable


class FlatWeights:
    """The weights of a wrapped model, by the names that it had before."""

    def __init__(
        self,
        table: WeightTable,
        units: Sequence[FlatUnit],
        buffers: Mapping[str, torch.Tensor],
        replicas: Sequence[int],
    ) -> None:
        """Take what was noted before wrapping.

        Args:
            table: the weights as they were.
            units: made of them by wrapping.
            buffers: the model's, live, by clean name.
            replicas: the ranks of the world that have the same pieces as this one.
        """
        self._replicas = replicas
        self.table = table
        self.units = units
        self.buffers = {name: buffers[name] for name in table.persistent_buffers}
        self.places = {member.name: (unit, member) for unit in units for member in unit.members}
        assert self.places.keys() == table.parameters.keys(), "FSDP1 manages other parameters than the model has"
        self._names = {id(fake): name for name, fake in (table.parameters | table.persistent_buffers).items()}

    def exported(self) -> dict[str, Exported]:
        """List what is exported, by the meta tensors of `WeightTable`."""
        return {
            name: Exported(tensor) for name, tensor in (self.table.parameters | self.table.persistent_buffers).items()
        }

    def full(self, entries: Iterable[tuple[str, Exported]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full weights, one unit at a time, adapters merged in; each is valid until the next is taken.

        Weights that follow each other in one unit share an all-gather. They are the masters that the optimizer steps,
        whatever the model computes in.

        Args:
            entries: their names outside, and which they are, as `exported` says.
        Collectives: one all-gather for each run of weights in one unit.
        """
        gatherer = _Gatherer(self)
        for name, entry in entries:
            yield name, gatherer.merged(entry)

    def load_full(self, exported: Mapping[str, Exported], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full weights into the shards, in place; each rank takes its own shard. No collectives.

        Raises:
            UnsupportedError: there are adapters, and a merged weight cannot be taken apart again.
            WeightsError: a name or shape that the model does not have, or a weight that is missing.
        """
        for fake, whole in paired_weights(own_tensors(exported), weights, lambda own: tuple(own.shape)):
            part = self.part(fake)
            part.tensor.copy_(whole.reshape(part.view_shape)[_slices(part)])

    def shards(self, exported: Mapping[str, Exported]) -> Iterator[WeightShard]:
        """Yield this rank's shard of each weight, adapters merged in; parameters are looked at as vectors.

        Collectives: none; for adapters an all-gather of each unit that has some.
        """
        gatherer = _Gatherer(self)
        for name, entry in exported.items():
            part = self.part(entry.tensor)
            tensor = part.tensor
            if entry.low_rank is not None:
                tensor = gatherer.merged(entry).reshape(part.view_shape)[_slices(part)].clone()
            is_piece = self.unit_of(entry.tensor) is not None
            shared = shared_by(self._replicas, tensor.numel()) if is_piece else replicas_of(tensor)
            yield WeightShard(name, part.view_shape, part.offsets, tensor, *shared)

    def load_shards(self, exported: Mapping[str, Exported], shards: Iterable[WeightShard]) -> None:
        """Take shards as `shards` yields them, in place. No collectives.

        Raises:
            UnsupportedError: there are adapters, and a merged weight cannot be taken apart again.
            WeightsError: a name or offsets that are not this rank's, or a weight that is missing.
        """
        for fake, given in paired_shards(own_tensors(exported), shards, self._place):
            self.part(fake).tensor.copy_(given)

    def _place(self, fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        part = self.part(fake)
        return part.view_shape, part.offsets, tuple(part.tensor.shape)

    def part(self, fake: torch.Tensor) -> WeightShard:
        """Return this rank's live shard of one weight, and its offsets."""
        name = self._names[id(fake)]
        if name in self.buffers:
            buffer = self.buffers[name].detach()
            return WeightShard(name, tuple(buffer.shape), (0,) * buffer.ndim, buffer)
        unit, member = self.places[name]
        return WeightShard(name, (member.numel,), unit.span(member)[:1], unit.piece(member))

    def gathered(self, fake: torch.Tensor, unit: FlatUnit, flat: torch.Tensor) -> torch.Tensor:
        """View one parameter in its unit's gathered tensor."""
        return unit.whole(self.places[self._names[id(fake)]][1], flat)

    def unit_of(self, fake: torch.Tensor) -> FlatUnit | None:
        """Return the unit that holds a parameter; None for a buffer."""
        name = self._names[id(fake)]
        return None if name in self.buffers else self.places[name][0]


class _Gatherer:
    """Keeps the unit that was gathered last."""

    def __init__(self, weights: FlatWeights) -> None:
        self._weights = weights
        self._unit: FlatUnit | None = None
        self._flat = torch.empty(0)

    def merged(self, entry: Exported) -> torch.Tensor:
        base = self._whole(entry.tensor)
        if entry.low_rank is None:
            return base
        # The adapter of a layer is wrapped together with it, so all three come from one gathering.
        a_RI, b_OR = self._whole(entry.low_rank.a_RI), self._whole(entry.low_rank.b_OR)
        return merged(base, LowRank(a_RI, b_OR, entry.low_rank.scale))

    def _whole(self, fake: torch.Tensor) -> torch.Tensor:
        unit = self._weights.unit_of(fake)
        if unit is None:
            return self._weights.part(fake).tensor
        if unit is not self._unit:
            self._flat = torch.empty(0)  # frees the former unit before the next one takes as much
            self._unit, self._flat = unit, unit.gather()
        # As it was before wrapping, which makes float32 of a mixed block; the same tensor wherever nothing was mixed.
        return self._weights.gathered(fake, unit, self._flat).to(fake.dtype)


def _slices(part: WeightShard) -> tuple[slice, ...]:
    """Return where a part lies in its view."""
    return tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.tensor.shape, strict=True))
