"""A tensor of which this rank holds any number of rectangular shards: what torch's checkpoints write and fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from verl_engine.contract.errors import WeightsError

Shard = tuple[tuple[int, ...], torch.Tensor]
"""Where a shard begins in the whole, one number per dim, and its content: live, or nothing could be loaded into it."""


class TensorShards(torch.Tensor):
    """Stands for a whole tensor in an engine's ``state_dict``, where a DTensor cannot say what a rank holds.

    A rank may hold none of it. Together the ranks hold every element; those that several of them hold lie in shards of
    the same offsets and shape, or only one of them writes. It is no tensor to compute with.

    Torch's distributed checkpoints ask objects in a state for what they hold by three methods with double underscores,
    as they ask a DTensor (torch.distributed._checkpointable).
    """

    shards: tuple[Shard, ...]
    is_written: bool

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, shards: Iterable[Shard] = (), *, is_written: bool = True
    ) -> Self:
        """Name the shards of this rank, without overlap; shape and dtype are those of the whole.

        Without `is_written` another rank writes the same elements, in shards of other shapes; they are read. A
        WeightsError where a shard does not lie in the whole, or has another dtype.
        """
        held = tuple((tuple(offsets), shard.detach()) for offsets, shard in shards)
        for offsets, shard in held:
            has_dims = len(offsets) == shard.ndim == len(shape)
            if not has_dims or any(
                begin < 0 or begin + size > end for begin, size, end in zip(offsets, shard.shape, shape, strict=True)
            ):
                raise WeightsError(f"a shard of shape {tuple(shard.shape)} at {offsets} does not lie in {tuple(shape)}")
            if shard.dtype != dtype:
                raise WeightsError(f"a shard has dtype {shard.dtype}, the whole {dtype}")
        whole: Self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)  # noqa: SLF001 - torch's way
        whole.shards = held
        whole.is_written = is_written
        return whole

    def map(self, function: Callable[[int, torch.Tensor], torch.Tensor]) -> TensorShards:
        """Return the same shards with other content, got from the number of the shard and its content."""
        shards = [(offsets, function(index, shard)) for index, (offsets, shard) in enumerate(self.shards)]
        return TensorShards(self.shape, self.dtype, shards, is_written=self.is_written)

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes a keyword of its own
        places = ", ".join(f"{tuple(shard.shape)} at {offsets}" for offsets, shard in self.shards)
        return f"TensorShards({tuple(self.shape)}, {self.dtype}, [{places}])"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub is of another kind of method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute: most of the elements are not here."""
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on {cls.__name__}: it only says which shards of a tensor this rank holds")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(shard), size=self.shape
                ),
            )
            for chunk, (_, shard) in zip(self.__create_chunk_list__(), self.shards, strict=True)
            if self.is_written and shard.numel()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), shard.shape) for offsets, shard in self.shards]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, shard in self.shards:
            if index.offset is not None and offsets == tuple(index.offset) and shard.numel():
                return shard
        raise WeightsError(f"this rank holds no shard of {index.fqn} at {index.offset}")
