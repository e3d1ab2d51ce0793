"""A key-value cache with a slot for each row, of which each has a length of its own: rows join and leave in place.

Shapes: R rows of room, S tokens of room, B rows in use, U rows read together, Q tokens read, E tokens attended to, H
heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

_GROWTH: Final = 1.25
_SPARE_TOKENS: Final = 16


class Slots:
    """Where the rows lie, and what the next forward reads and writes; shared by the layers."""

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        self.device = device
        self.lengths: list[int] = []
        """Tokens held in each slot in use."""
        self.room = (0, 0)
        """R and S."""
        self.is_fresh = False
        """Whether the forward reads rows from their first token on, which attend to nothing but each other."""
        self.rows: torch.Tensor | None = None
        """[U] int64: slots that attend to what they hold; None for all in use."""
        self.num_attended = 0
        """E."""
        self._max_tokens = max_tokens
        self._target_UQ: torch.Tensor
        self._targets: dict[int, torch.Tensor] = {}

    def make_room(self, num_rows: int, num_tokens: int) -> None:
        """Decide on room for so many rows and tokens; the layers follow at their next update."""
        if num_rows <= self.room[0] and num_tokens <= self.room[1]:
            return
        rows = max(num_rows, self.room[0] if num_tokens > self.room[1] else int(num_rows * _GROWTH))
        tokens = int(num_tokens * _GROWTH) + _SPARE_TOKENS
        if rows * tokens > self._max_tokens:
            rows, tokens = num_rows, max(num_tokens, min(tokens, self._max_tokens // num_rows))
        self.room = (rows, tokens)

    def write_at(self, slots_U: torch.Tensor, positions_UQ: torch.Tensor) -> None:
        """Say into which slots, and at which positions in them, the next forward writes."""
        self._slots_U1, self._positions_UQ = slots_U[:, None], positions_UQ
        self._targets = {}

    def advance(self) -> None:
        """Write one token further on; the slots stay."""
        for target in self._targets.values():
            target.add_(1)

    def targets(self, num_heads: int) -> torch.Tensor:
        """[U * H * Q] int64: places of the next keys in room seen as [R * H * S, D]."""
        target = self._targets.get(num_heads)
        if target is None:
            heads_H = torch.arange(num_heads, device=self.device)
            first_UH = (self._slots_U1 * num_heads + heads_H) * self.room[1]
            target = (first_UH[:, :, None] + self._positions_UQ[:, None]).flatten()
            self._targets[num_heads] = target
        return target


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots
        self.key_room: torch.Tensor | None = None
        self.value_room: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: `update` makes room."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [U, H, Q, D] keys and values; return those to attend to, [U, H, E, D]."""
        slots = self._slots
        key_room, value_room = self._fitting(key_states, value_states)
        target = slots.targets(key_states.shape[1])
        for room, states in ((key_room, key_states), (value_room, value_states)):
            room.view(-1, room.shape[-1]).index_copy_(0, target, states.reshape(-1, states.shape[-1]))
        if slots.is_fresh:
            return key_states, value_states
        rows = slice(0, len(slots.lengths)) if slots.rows is None else slots.rows
        return key_room[rows, :, : slots.num_attended], value_room[rows, :, : slots.num_attended]

    def take_out(self, slot: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first tokens of a slot: keys and values, [H, tokens, D]."""
        assert self.key_room is not None
        return self.key_room[slot, :, :num_tokens].clone(), self.value_room[slot, :, :num_tokens].clone()

    def put_back(self, slot: int, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        """Lay the first tokens of what was taken out into a slot."""
        key_room, value_room = self._fitting(keys[None], values[None])
        key_room[slot, :, :num_tokens] = keys[:, :num_tokens]
        value_room[slot, :, :num_tokens] = values[:, :num_tokens]

    def _fitting(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the room, as large as was decided; keys and values show the number of heads and their dim."""
        old, room = self.key_room, self._slots.room
        if old is None or (old.shape[0], old.shape[2]) != room:
            self.value_room = _moved(None if old is None else self.value_room, values, room)
            self.key_room = _moved(old, keys, room)
            return self.key_room, self.value_room
        return old, self.value_room

    def move(self, sources: torch.Tensor, targets: torch.Tensor, num_tokens: int) -> None:
        """Copy the first tokens of some slots into others."""
        if self.key_room is not None:
            for room in (self.key_room, self.value_room):
                room[targets, :, :num_tokens] = room[sources, :, :num_tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask that transformers makes covers; only a fresh read has one."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Tokens read before, where the model asks; positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; the name in transformers 4."""
        return -1


def _moved(old: torch.Tensor | None, like: torch.Tensor, room: tuple[int, int]) -> torch.Tensor:
    """Make [R, H, S, D] room that holds what the old room does, as far as it fits.

    It is zero where nothing was written: what a mask hides still goes into a product, which NaN would spoil.
    """
    new = like.new_zeros(room[0], like.shape[1], room[1], like.shape[3])
    if old is not None:
        rows, tokens = min(old.shape[0], room[0]), min(old.shape[2], room[1])
        new[:rows, :, :tokens] = old[:rows, :, :tokens]
    return new


class SlotCache(Cache):
    """The layers of a model."""

    def __init__(self, slots: Slots, layer_types: Sequence[str]) -> None:
        self.slot_layers = [SlotLayer(slots) for _ in layer_types]
        for layer, kind in zip(self.slot_layers, layer_types, strict=True):
            layer.is_sliding = kind == "sliding_attention"
        super().__init__(layers=cast("list[Any]", self.slot_layers))
