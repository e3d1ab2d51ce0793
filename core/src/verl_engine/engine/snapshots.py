"""Weights kept aside on the CPU, by tag: for old-policy log-probs, for trying a step and taking it back.

Each rank keeps its own shards. Storage is the snapshot's own, made once and reused; it never aliases live weights.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from verl_engine.engine.base import Engine
    from verl_engine.host.backend_host import BackendHost


@dataclass(slots=True)
class WeightSnapshot:
    """One rank's weights at one moment."""

    tag: str
    version: int = 0
    """Optimizer steps that the engine's owner had counted when it was taken."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """This rank's shards, on the CPU."""

    @property
    def num_bytes(self) -> int:
        """Memory it holds on this rank."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def checksum(self) -> int:
        """CRC-32 over names and bytes, in order of the names."""
        crc = 0
        for name in sorted(self.tensors):
            crc = zlib.crc32(
                self.tensors[name].reshape(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), crc)
            )
        return crc

    def store(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightSnapshot:
        """Copy tensors in, into the memory of an earlier copy where shape and dtype still fit."""
        former, self.tensors = self.tensors, {}
        for name, tensor in weights:
            own = former.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self.tensors[name] = own.copy_(tensor.detach())
        return self

    def copy_into(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into live tensors, in place.

        Raises:
            WeightsError: the names or shapes are not those that were stored; nothing was copied.
        """
        live = dict(weights)
        if live.keys() != self.tensors.keys():
            odd = sorted(live.keys() ^ self.tensors.keys())
            raise WeightsError(
                f"snapshot {self.tag!r} and the engine do not hold the same weights: {', '.join(odd[:5])}"
            )
        for name, tensor in live.items():
            if tensor.shape != self.tensors[name].shape:
                raise WeightsError(
                    f"snapshot {self.tag!r} holds {name} with shape {tuple(self.tensors[name].shape)}, the engine with "
                    f"{tuple(tensor.shape)}"
                )
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(self.tensors[name])


class Snapshots:
    """The snapshots of one engine on one rank; every rank makes the same calls."""

    def __init__(self, host: BackendHost, engine: Engine) -> None:
        """Start without any.

        Raises:
            UnsupportedError: the backend has no snapshots.
        """
        host.require("snapshots")
        self._host = host
        self._engine = engine
        self._kept: dict[str, WeightSnapshot] = {}

    def save(self, tag: str, version: int = 0) -> WeightSnapshot:
        """Copy the weights in force, over what the tag held before."""
        snapshot = self._kept.get(tag) or WeightSnapshot(tag)
        snapshot.version = version
        self._kept[tag] = self._host.copy_weights_to_cpu(self._engine, snapshot)
        return self._kept[tag]

    def restore(self, tag: str) -> None:
        """Put the weights of a tag back in force.

        Raises:
            WeightsError: nothing was saved under the tag.
        """
        self._host.restore_weights_from_cpu(self._engine, self._get(tag))

    def drop(self, tag: str) -> None:
        """Forget a tag and free its memory.

        Raises:
            WeightsError: nothing was saved under the tag.
        """
        self._get(tag)
        del self._kept[tag]

    @contextmanager
    def swapped(self, tag: str) -> Iterator[None]:
        """Use the weights of a tag inside; those in force before come back in any case."""
        self._get(tag)
        before = self._host.copy_weights_to_cpu(self._engine, WeightSnapshot("before swapped"))
        self.restore(tag)
        try:
            yield
        finally:
            self._host.restore_weights_from_cpu(self._engine, before)

    def _get(self, tag: str) -> WeightSnapshot:
        if tag not in self._kept:
            raise WeightsError(f"no weights were saved under {tag!r}; saved are {sorted(self._kept) or 'none'}")
        return self._kept[tag]
