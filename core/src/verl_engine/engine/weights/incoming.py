"""Weights that come in, paired with an engine's own: each once, all of them, in the right shape and at its offsets."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import WeightShard

Own = TypeVar("Own")
Shape = tuple[int, ...]


def paired_weights(
    own: Mapping[str, Own], weights: Iterable[tuple[str, torch.Tensor]], shape_of: Callable[[Own], Shape]
) -> Iterator[tuple[Own, torch.Tensor]]:
    """Yield the engine's own and the full weight that came for it, detached, in the order in which they come.

    A WeightsError for a name or shape that the engine does not have, or a weight that is missing, which is known last.
    """
    missing = dict(own)
    for name, whole in weights:
        shape = tuple(whole.shape)
        entry = _take(missing, name, f"of shape {shape}")
        if shape_of(entry) != shape:
            raise WeightsError(f"weight {name} of shape {shape} does not fit: the model has shape {shape_of(entry)}")
        yield entry, whole.detach()
    _require_none(missing)


def paired_shards(
    own: Mapping[str, Own], shards: Iterable[WeightShard], layout_of: Callable[[Own], tuple[Shape, Shape, Shape]]
) -> Iterator[tuple[Own, torch.Tensor]]:
    """Yield the engine's own and the shard that came for it, detached, in the order in which they come.

    `layout_of` gives view shape, offsets and shape of this rank's shard of one of its own. A WeightsError for a name or
    offsets that are not this rank's, or a weight that is missing, which is known last.
    """
    missing = dict(own)
    for shard in shards:
        given = shard.view_shape, shard.offsets, tuple(shard.tensor.shape)
        what = f"at {shard.offsets}, of shape {given[2]}, in {shard.view_shape}"
        entry = _take(missing, shard.name, what)
        view_shape, offsets, shape = layout_of(entry)
        if given != (view_shape, offsets, shape):
            raise WeightsError(
                f"the shard of {shard.name} {what} is not this rank's, which is at {offsets}, of shape {shape}, in "
                f"{view_shape}"
            )
        yield entry, shard.tensor.detach()
    _require_none(missing)


def _take(missing: dict[str, Own], name: str, what: str) -> Own:
    if name not in missing:
        raise WeightsError(f"weight {name} {what} does not fit: the model has no such weight, or had it already")
    return missing.pop(name)


def _require_none(missing: Mapping[str, object]) -> None:
    if missing:
        raise WeightsError(f"{len(missing)} weights are missing: {', '.join(sorted(missing)[:5])}")
