"""Rank 0's model on every rank, module by module: only rank 0 ever holds a full one."""

from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_engine.contract.errors import ModelError
from verl_engine.engine.weights.shards import offsets_and_shape, shard_of

_KINDS: Final = ("parameter", "buffer", "attribute")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module holds a tensor."""

    module: str
    kind: str
    """``attribute``: neither parameter nor buffer, such as transformers' older copies of rotary frequencies."""
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of rank 0, and all its places: more than one where it is tied."""

    places: tuple[Place, ...]
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @property
    def is_parameter(self) -> bool:
        """Whether it is one in any of its places."""
        return any(place.kind == "parameter" for place in self.places)


class Materializer:
    """Gives a model that is on the meta device on all ranks but 0 the tensors of rank 0, on the ranks' devices.

    Call it with a module to fill that, with all inside; then shard the module, which frees the whole tensors; at last
    call it with the root. Every rank makes the same calls. What is filled already is left alone. A tensor that several
    modules share, parameter or buffer, inside one block or across, stays one tensor; ties are those of rank 0, also
    where the weights it read made transformers tie otherwise than the config says. Shapes, dtypes and
    ``requires_grad`` are rank 0's too. On one rank, or without a process group, it only moves the model.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Compare the models of all ranks, and tie those on the meta device as rank 0 has it.

        Raises:
            ModelError: a rank's model has other parameters or buffers than rank 0's; on every rank.
        Collectives: one broadcast and one all-gather of small objects.
        """
        # Kept from now on: wrapping a module in another one changes the paths below it.
        self._modules = dict(model.named_modules())
        self._device = device
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._is_source = self._num_ranks == 1 or dist.get_rank() == 0
        # Names in order: every rank broadcasts in the same one, however its modules were put together.
        self._pending = sorted(_entries(model), key=lambda entry: str(entry.places[0]))
        if self._num_ranks > 1:
            self._agree()

    def __call__(self, module: torch.nn.Module) -> None:
        """Fill one module, with all inside it. Collectives: a broadcast for each tensor that was not filled yet."""
        inside = {id(inner) for inner in module.modules()}
        due: list[Entry] = []
        later: list[Entry] = []
        for entry in self._pending:
            is_due = any(id(self._modules[place.module]) in inside for place in entry.places)
            (due if is_due else later).append(entry)
        self._pending = later
        for entry in due:
            self._fill(entry)

    def defer(self) -> Callable[[], None]:
        """Fill everything but parameters; those get their values when the model has been sharded by somebody else.

        Meanwhile rank 0 has its own, and the others untouched memory on the CPU, of which none is in use yet:
        so whoever shards finds the same kind of model on every rank. Use it in place of calls with modules.

        Returns:
            What gives the sharded model's parameters, DTensors or whole ones, rank 0's values; to be called once.
        Collectives: a broadcast for each tensor that is no parameter; later one for each parameter.
        """
        held = [entry for entry in self._pending if entry.is_parameter]
        for entry in self._pending:
            if not entry.is_parameter:
                self._fill(entry)
            elif not self._is_source:
                self._put(entry, torch.empty(entry.shape, dtype=entry.dtype))
        whole = [self._held(entry.places[0]) if self._is_source else None for entry in held]
        self._pending = []

        def fill() -> None:
            for index, entry in enumerate(held):
                self._fill_shards(entry, whole[index])
                whole[index] = None

        return fill

    @torch.no_grad()
    def _fill(self, entry: Entry) -> None:
        old = self._held(entry.places[0])
        value = self._broadcast(entry, old)
        if self._is_source and value.data_ptr() == old.data_ptr():
            return  # it is where it belongs already, and whoever holds it keeps it
        self._put(entry, value)

    @torch.no_grad()
    def _fill_shards(self, entry: Entry, whole: torch.Tensor | None) -> None:
        """Cut this rank's shard out of a full parameter, in every place that holds one."""
        value = self._broadcast(entry, whole)
        shards = {id(shard): shard for shard in map(self._held, entry.places)}
        for shard in shards.values():
            local = shard.to_local() if isinstance(shard, DTensor) else shard
            local.copy_(shard_of(value, *offsets_and_shape(shard)))

    def _broadcast(self, entry: Entry, own: torch.Tensor | None) -> torch.Tensor:
        """Return rank 0's tensor on this rank's device."""
        if self._is_source:
            assert own is not None
            value = own.detach().to(self._device).contiguous()
        else:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        if self._num_ranks > 1 and value.numel():
            # As bytes: not every dtype that buffers have is known to every communication library.
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)
        return value

    def _held(self, place: Place) -> torch.Tensor:
        tensor = _members(self._modules[place.module], place.kind)[place.name]
        assert tensor is not None
        return tensor.detach()

    def _put(self, entry: Entry, value: torch.Tensor) -> None:
        held = torch.nn.Parameter(value, requires_grad=entry.requires_grad) if entry.is_parameter else value
        for place in entry.places:
            _members(self._modules[place.module], place.kind)[place.name] = held

    def _agree(self) -> None:
        """Make every rank's model like rank 0's, but for the values."""
        sent = [self._pending]
        dist.broadcast_object_list(sent, src=0)
        problem = ""
        if not self._is_source:
            problem = _difference(self._pending, sent[0], self._modules.keys())
        problems: list[str] = [""] * self._num_ranks
        dist.all_gather_object(problems, problem)
        if any(problems):
            rank, first = next((rank, text) for rank, text in enumerate(problems) if text)
            raise ModelError(
                f"rank {rank} built another model than rank 0 read from the folder: {first}; check that all ranks have "
                "the same release of transformers and the same config.json"
            )
        if self._is_source:
            return
        self._pending = sent[0]
        for entry in self._pending:
            self._put(entry, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))


def _entries(model: torch.nn.Module) -> Iterator[Entry]:
    """Yield every tensor that the modules hold, once, with its places."""
    tensors: dict[int, torch.Tensor] = {}
    places: dict[int, list[Place]] = {}
    for path, module in model.named_modules():
        for kind in _KINDS:
            for name, tensor in _members(module, kind).items():
                if isinstance(tensor, torch.Tensor):
                    tensors[id(tensor)] = tensor
                    places.setdefault(id(tensor), []).append(Place(path, kind, name))
    for key, tensor in tensors.items():
        found = tuple(sorted(places[key], key=str))
        yield Entry(found, tensor.shape, tensor.dtype, tensor.requires_grad)


def _members(module: torch.nn.Module, kind: str) -> MutableMapping[str, torch.Tensor | None]:
    if kind == "parameter":
        return cast("MutableMapping[str, torch.Tensor | None]", module._parameters)  # noqa: SLF001 - to set a tied one
    return module._buffers if kind == "buffer" else vars(module)  # noqa: SLF001 - as above


def _difference(own: list[Entry], expected: list[Entry], modules: Collection[str]) -> str:
    """Say in what this rank's model differs from rank 0's, other than in ties, dtypes and plain attributes."""
    strange = sorted({place.module for entry in expected for place in entry.places} - set(modules))
    if strange:
        return f"it has no module {strange[0]}"
    own_shapes, expected_shapes = _shapes(own), _shapes(expected)
    if own_shapes == expected_shapes:
        return ""
    names = sorted(
        name for name in own_shapes.keys() | expected_shapes.keys() if own_shapes.get(name) != expected_shapes.get(name)
    )
    return ", ".join(
        f"{name} is {_describe(own_shapes.get(name))} instead of {_describe(expected_shapes.get(name))}"
        for name in names[:3]
    )


def _shapes(entries: list[Entry]) -> dict[str, tuple[int, ...]]:
    return {str(place): tuple(entry.shape) for entry in entries for place in entry.places if place.kind != "attribute"}


def _describe(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else f"of shape {shape}"
