"""How an engine over one torch module reaches its weights and its optimizer's state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # what nn.Module.to itself asks about DTensors

from verl_engine.engine.base import WeightShard
from verl_engine.engine.checkpoints.module import load_module_state, module_state
from verl_engine.engine.weights.incoming import paired_shards, paired_weights
from verl_engine.engine.weights.module_weights import (
    Exported,
    LowRank,
    exported_tensors,
    full_tensor,
    local_tensor,
    merged,
    own_tensors,
)
from verl_engine.engine.weights.shards import offsets_and_shape, replicas_of, shard_of


class EngineWeights:
    """Plain tensors and DTensors of one module; derived from where a wrapper keeps them otherwise.

    `exported` says what there is, by the names of the module before it was wrapped. The other methods take such a dict,
    maybe with other names and with adapters.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Take what is called in a forward, wrapped already if it is to be."""
        self.module = self.plain = module
        """The latter has transformers' ``config`` and ``save_pretrained``."""
        # Between a forward and a backward a sharded module holds gathered parameters; these are the shards, always.
        self.parameters = dict(module.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all buffers, live."""
        return self.module.named_buffers()

    def exported(self) -> dict[str, Exported]:
        """Say what a Hugging Face folder holds."""
        return exported_tensors(self.module, self.parameters)

    def full(self, exported: Mapping[str, Exported], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full weights one by one, adapters merged in; each is valid until the next is taken.

        No more than one full weight is alive at a time, if the caller drops it before it takes the next.
        Collectives: an all-gather for each sharded one, and two more for an adapter's.
        """
        for name in names:
            yield name, _gathered(exported[name])

    def load_full(self, exported: Mapping[str, Exported], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full weights into the shards, in place: each rank cuts out its own shard. No collectives.

        Raises:
            UnsupportedError: there are adapters, and a merged weight cannot be taken apart again.
            WeightsError: a name or shape that the model does not have, or a weight that is missing.
        """
        for own, whole in paired_weights(own_tensors(exported), weights, lambda own: tuple(own.shape)):
            local_tensor(own).copy_(shard_of(whole, *offsets_and_shape(own)))

    def shards(self, exported: Mapping[str, Exported]) -> Iterator[WeightShard]:
        """Yield this rank's shard of each weight with its offsets, adapters merged in.

        Collectives: none; for an adapter two all-gathers, of its own small matrices.
        """
        for name, entry in exported.items():
            offsets, shape = offsets_and_shape(entry.tensor)
            part = local_tensor(entry.tensor)
            if entry.low_rank is not None:
                a_RI, b_OR = full_tensor(entry.low_rank.a_RI), full_tensor(entry.low_rank.b_OR)
                b_part = shard_of(b_OR, (offsets[0], 0), (shape[0], b_OR.shape[1]))
                a_part = shard_of(a_RI, (0, offsets[1]), (a_RI.shape[0], shape[1]))
                part = merged(part, LowRank(a_part, b_part, entry.low_rank.scale))
            yield WeightShard(name, tuple(entry.tensor.shape), offsets, part, *replicas_of(entry.tensor))

    def load_shards(self, exported: Mapping[str, Exported], shards: Iterable[WeightShard]) -> None:
        """Copy shards in, in place, as `shards` of the same rank gives them. No collectives.

        Raises:
            UnsupportedError: there are adapters, and a merged weight cannot be taken apart again.
            WeightsError: a name or offsets that are not this rank's, or a weight that is missing.
        """
        pairs = paired_shards(own_tensors(exported), shards, lambda own: (tuple(own.shape), *offsets_and_shape(own)))
        for own, part in pairs:
            local_tensor(own).copy_(part)

    def state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the state of weights, buffers and optimizer; see `Engine.state_dict`."""
        return module_state(self.module, optimizer)

    def load_state(self, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
        """Take such a state."""
        load_module_state(self.module, optimizer, state)

    def apply(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do what ``module.to`` does, by another copy, and with shared buffers still shared.

        ``_apply`` is where wrappers hook in: fully_shard points its own references at the new storage there.
        """
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, torch.nn.Parameter):  # changed in place, so it stays shared
                return map_local(tensor, copy)
            if id(tensor) not in moved:
                moved[id(tensor)] = (tensor, map_local(tensor, copy))  # the old one is kept, and its id with it
            return moved[id(tensor)][1]

        self.module._apply(move)  # noqa: SLF001 - what module.to and module.cuda call


def _gathered(entry: Exported) -> torch.Tensor:
    base = full_tensor(entry.tensor)
    if entry.low_rank is None:
        return base
    adapter = LowRank(full_tensor(entry.low_rank.a_RI), full_tensor(entry.low_rank.b_OR), entry.low_rank.scale)
    return merged(base, adapter)


def map_local(tensor: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Copy a tensor, or the shard inside a DTensor: its own methods would bring it to its mesh's device again."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return copy(tensor.detach())
    names, context = wrapper.__tensor_flatten__()
    held = {name: getattr(wrapper, name) for name in names}  # newer releases of torch list a DTensor's mesh too
    parts = {name: map_local(part, copy) if isinstance(part, torch.Tensor) else part for name, part in held.items()}
    whole: torch.Tensor = type(wrapper).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return whole.detach()
