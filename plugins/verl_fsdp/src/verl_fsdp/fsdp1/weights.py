"""Full weights, and this rank's pieces of them, in and out of FSDP1's flat tensors.

Shape legend: O outputs and I inputs of a layer, R the rank of an adapter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from verl_engine.engine.base import WeightShard
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.incoming import paired_shards, paired_weights
from verl_engine.engine.weights.module_weights import Exported, LowRank, merged, own_tensors
from verl_engine.engine.weights.shards import replicas_of, shared_by
from verl_fsdp.fsdp1.flat_unit import FlatUnit, flat_units
from verl_fsdp.fsdp1.state import load_model_state, load_optimizer_state, model_state, optimizer_state


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Meta tensors in place of full weights, under the names they had before FSDP1 made flat pieces of them.

    Order is the model's; tied parameters come once.
    """

    parameters: dict[str, torch.Tensor]
    persistent_buffers: dict[str, torch.Tensor]
    """What a Hugging Face folder holds besides parameters."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self:
        """Note a model that is not wrapped yet; its weights may be on the meta device already."""
        saved = model.state_dict(keep_vars=True)
        return cls(
            {name: torch.empty_like(parameter, device="meta") for name, parameter in model.named_parameters()},
            {name: torch.empty_like(buffer, device="meta") for name, buffer in model.named_buffers() if name in saved},
        )


def clean_name(name: str) -> str:
    """Take the wrappers out of the path of a parameter, buffer or module."""
    return name.replace("_fsdp_wrapped_module.", "")


class FlatWeights(EngineWeights):
    """The weights of a wrapped model, by the names that it had before."""

    def __init__(
        self, root: FullyShardedDataParallel, table: WeightTable, mesh: DeviceMesh, device: torch.device
    ) -> None:
        """Take the initialised wrapped model, its weights as they were before, and who shares a copy of them."""
        super().__init__(root)
        self.plain = root.module
        self.parameters = {clean_name(name): parameter for name, parameter in root.named_parameters()}
        self._mesh = mesh
        self._replicas = mesh.mesh.reshape(-1, mesh["shard"].size())[:, mesh.get_local_rank("shard")].tolist()
        self.table = table
        self.units = flat_units(root, {id(parameter): name for name, parameter in self.parameters.items()}, device)
        buffers = dict(self.named_buffers())
        self.buffers = {name: buffers[name] for name in table.persistent_buffers}
        self.places = {member.name: (unit, member) for unit in self.units for member in unit.members}
        assert self.places.keys() == table.parameters.keys(), "FSDP1 manages other parameters than the model has"
        self._names = {id(fake): name for name, fake in (table.parameters | table.persistent_buffers).items()}

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all buffers, live, by the names they had before wrapping."""
        return ((clean_name(name), buffer) for name, buffer in self.module.named_buffers())

    def exported(self) -> dict[str, Exported]:
        """List what is exported, by the meta tensors of `WeightTable`."""
        return {
            name: Exported(tensor) for name, tensor in (self.table.parameters | self.table.persistent_buffers).items()
        }

    def full(self, exported: Mapping[str, Exported], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full weights, one unit at a time, adapters merged in; each is valid until the next is taken.

        They are the masters that the optimizer steps, whatever the model computes in.
        Collectives: one all-gather for each run of weights in one unit.
        """
        gatherer = _Gatherer(self)
        for name in names:
            yield name, gatherer.merged(exported[name])

    def load_full(self, exported: Mapping[str, Exported], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full weights into the shards; each rank takes its own shard; see the base class. No collectives."""
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
        """Take shards as `shards` yields them, in place; see the base class. No collectives."""
        for fake, given in paired_shards(own_tensors(exported), shards, self._place):
            self.part(fake).tensor.copy_(given)

    def _place(self, fake: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        part = self.part(fake)
        return part.view_shape, part.offsets, tuple(part.tensor.shape)

    def state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the state with the keys that fsdp2 has.

        Takes the memory of one more shard of weights and optimizer state: FSDP1 cuts them elsewhere than DTensors are.
        Collectives: an all-gather per unit, and for the optimizer one per unit and key.
        """
        buffers = {name: buffer.detach() for name, buffer in self.named_buffers() if name not in self.buffers}
        state: dict[str, Any] = {"model": model_state(self, self._mesh), "buffers": buffers}
        if optimizer is not None:
            state["optimizer"] = optimizer_state(self, optimizer, self._mesh)
        return state

    @torch.no_grad()
    def load_state(self, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
        """Take such a state, of fsdp2 too. Collectives: an all-gather per sharded tensor."""
        load_model_state(self, state["model"])
        buffers = dict(self.named_buffers())
        for name, value in state.get("buffers", {}).items():
            buffers[name].copy_(value)
        if optimizer is not None:
            load_optimizer_state(self, optimizer, state["optimizer"])

    def apply(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move shards as wholes: ``module.to`` would leave FSDP1's own references to them behind, on the device."""
        for unit in self.units:
            unit.replace_local(copy(unit.local))
        for buffer in self.module.buffers():  # those that modules share stay shared
            buffer.data = copy(buffer.detach())

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
    return tuple(slice(offset, offset + size) for offset, size in zip(part.offsets, part.tensor.shape, strict=True))
