"""A tensor of which this rank holds any number of rectangular parts: what torch's checkpoints write and fill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

Part = tuple[tuple[int, ...], torch.Tensor]
"""Where a part begins in the whole, one number per dim, and its content: live, or nothing could be loaded into it."""


class TensorParts(torch.Tensor):
    """Stands for a whole tensor in an engine's ``state_dict``, where a DTensor cannot say what a rank holds.

    A rank may hold none of it. Together the ranks hold every element; those that several of them hold lie in parts of
    the same offsets and shape, or only one of them writes. It is no tensor to compute with.

    Torch's distributed checkpoints ask objects in a state for what they hold by three methods with double underscores,
    as they ask a DTensor (torch.distributed._checkpointable).
    """

    parts: tuple[Part, ...]
    is_written: bool

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Part] = (), *, is_written: bool = True
    ) -> Self:
        """Name the parts.

        Args:
            shape: of the whole.
            dtype: of the whole and of each part.
            parts: of this rank, without overlap.
            is_written: False where another rank writes the same elements in parts of other shapes; they are still read.
        Raises:
            WeightsError: a part does not lie in the whole, or has another dtype.
        """
        held = tuple((tuple(offsets), part.detach()) for offsets, part in parts)
        for offsets, part in held:
            has_dims = len(offsets) == part.ndim == len(shape)
            if not has_dims or any(
                begin < 0 or begin + size > end for begin, size, end in zip(offsets, part.shape, shape, strict=True)
            ):
                raise WeightsError(f"a part of shape {tuple(part.shape)} at {offsets} does not lie in {tuple(shape)}")
            if part.dtype != dtype:
                raise WeightsError(f"a part has dtype {part.dtype}, the whole {dtype}")
        whole: Self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)  # noqa: SLF001 - torch's way
        whole.parts = held
        whole.is_written = is_written
        return whole

    def map(self, function: Callable[[int, torch.Tensor], torch.Tensor]) -> TensorParts:
        """Return the same parts with other content, got from the number of the part and its content."""
        parts = [(offsets, function(index, part)) for index, (offsets, part) in enumerate(self.parts)]
        return TensorParts(self.shape, self.dtype, parts, is_written=self.is_written)

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes a keyword of its own
        places = ", ".join(f"{tuple(part.shape)} at {offsets}" for offsets, part in self.parts)
        return f"TensorParts({tuple(self.shape)}, {self.dtype}, [{places}])"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub is of another kind of method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute: most of the elements are not here."""
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"{func} on {cls.__name__}: it only says which parts of a tensor this rank holds")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Say what is to be written."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(part), size=self.shape
                ),
            )
            for chunk, (_, part) in zip(self.__create_chunk_list__(), self.parts, strict=True)
            if self.is_written and part.numel()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Say what is to be read."""
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part at these offsets."""
        for offsets, part in self.parts:
            if index.offset is not None and offsets == tuple(index.offset) and part.numel():
                return part
        raise WeightsError(f"this rank holds no part of {index.fqn} at {index.offset}")
