"""A model over a `SlotCache`: rows join and leave between two tokens. Call under torch.inference_mode.

Shapes as in `slot_cache`; V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from verl_async.rollout.slot_cache import SlotCache, Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from verl_async.rollout.parked import Prefix
    from verl_async.rollout.routes import Experts, RouteRecorder

_READ_AT_ONCE: Final = 2**14
"""Tokens of prompts, padding included, that one forward reads."""


class SlotModel:
    """The running batch of a model whose layers are of full or sliding attention."""

    can_join = True

    def __init__(self, model: PreTrainedModel, max_tokens: int, recorder: RouteRecorder | None = None) -> None:
        config = model.config.get_text_config(decoder=True)
        own_types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        # As in transformers: without types of layers, a window is that of all.
        types = own_types or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(f"its layers are of {', '.join(unknown)}")
        self._model = model
        self._recorder = recorder
        self.routes: list[Experts] = []
        """Of each row that was read last, one that joined or all: the experts of what was read; empty where nothing
        records them."""
        self._window = window if "sliding_attention" in types else None
        self._has_types = bool(own_types)
        self._accepted = inspect.signature(model.forward).parameters.keys()
        self._slots = Slots(model.device, max_tokens)
        self._cache = SlotCache(self._slots, types)
        self._mask: torch.Tensor | None = None  # [R, S], 0 at what a row holds, else -inf; None where it must be made
        self._length_B1: torch.Tensor
        self.num_read = 0
        """Tokens of prompts read since the start."""

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each row."""
        return self._slots.lengths

    def join(
        self, contexts: Sequence[tuple[int, ...]], prefixes: Mapping[tuple[int, ...], Prefix | None] | None = None
    ) -> torch.Tensor:
        """Read one context for each new row; equal contexts (the samples of a group) are read once.

        Args:
            contexts: token ids of each row, any lengths above zero.
            prefixes: what is there already of some, by context; shorter than it.
        Returns:
            [new rows, V] logits after each context.
        """
        base = len(self.lengths)
        first: dict[tuple[int, ...], int] = {}
        for place, context in enumerate(contexts):
            first.setdefault(context, place)
        self.lengths.extend(map(len, contexts))
        self._mask = None
        self._slots.make_room(len(self.lengths), max(self.lengths) + 1)
        found = {place: (prefixes or {}).get(context) for context, place in first.items()}
        started = {place: prefix for place, prefix in found.items() if prefix is not None}
        # Short ones together, so that there is little padding.
        order = sorted(first.values(), key=lambda place: (place in started, len(contexts[place])))
        rows: dict[int, torch.Tensor] = {}
        routes: dict[int, Experts] = {}
        for chunk in _chunks(order, contexts, started):
            logits = self._read(base, [contexts[place] for place in chunk], chunk, started)
            rows.update(zip(chunk, logits, strict=True))
            routes.update(zip(chunk, self.routes, strict=False))
        copies = [(first[context], place) for place, context in enumerate(contexts) if first[context] != place]
        if copies:
            sources, targets = torch.tensor(copies, device=self._model.device).T + base
            longest = max(len(contexts[place]) for place, _ in copies)
            for layer in self._cache.slot_layers:
                layer.move(sources, targets, longest)
        self.routes = [routes[first[context]] for context in contexts] if routes else []
        return torch.stack([rows[first[context]] for context in contexts])

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Read one more token a row and return the [B, V] logits after it."""
        slots = self._slots
        num_rows, longest = len(slots.lengths), max(slots.lengths) + 1
        slots.make_room(num_rows, longest)
        slots.is_fresh, slots.rows, slots.num_attended = False, None, longest
        if self._mask is None or self._mask.shape != slots.room:
            self._rebuild()
        else:
            slots.advance()
            self._place_B += 1
        assert self._mask is not None
        self._mask.view(-1).index_fill_(0, self._place_B, 0.0)
        logits_BV = self._forward(token_B[:, None], self._length_B1, self._mask[:num_rows, None, None, :longest])
        self._length_B1 = self._length_B1 + 1
        slots.lengths[:] = [length + 1 for length in slots.lengths]
        return logits_BV

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was, of which none may come twice; only rows that change their place are copied.

        Rows beyond the new end are the only ones that are copied from.
        """
        moved = [(source, target) for target, source in enumerate(rows) if source != target]
        if moved:
            sources, targets = torch.tensor(moved, device=self._model.device).T
            longest = max(self.lengths[source] for source, _ in moved)
            for layer in self._cache.slot_layers:
                layer.move(sources, targets, longest)
        self.lengths[:] = [self.lengths[row] for row in rows]
        self._mask = None

    def park(self, row: int, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the keys and values, [H, tokens, D] for each layer, of a row's first tokens."""
        return [layer.take_out(row, num_tokens) for layer in self._cache.slot_layers]

    def _rebuild(self) -> None:
        """Make mask, lengths and targets anew, after rows came or left or the room changed."""
        slots, device = self._slots, self._model.device
        num_rows, (_, room) = len(slots.lengths), slots.room
        length_B = torch.tensor(slots.lengths, device=device)
        self._mask = torch.full(slots.room, -torch.inf, dtype=self._model.dtype, device=device)
        held = torch.arange(room, device=device) < length_B[:, None]
        self._mask[:num_rows].masked_fill_(held, 0.0)
        row_B = torch.arange(num_rows, device=device)
        slots.write_at(row_B, length_B[:, None])
        self._place_B = row_B * room + length_B
        self._length_B1 = length_B[:, None]

    def _read(
        self, base: int, contexts: list[tuple[int, ...]], places: list[int], started: dict[int, Prefix]
    ) -> torch.Tensor:
        """Read contexts into slots base + place, from where their prefixes end; return the [U, V] logits after each."""
        device, slots = self._model.device, self._slots
        starts = [started[place].num_tokens if place in started else 0 for place in places]
        ids = [context[start:] for context, start in zip(contexts, starts, strict=True)]
        self.num_read += sum(map(len, ids))
        width = max(map(len, ids))
        ids_UQ = torch.tensor([[*part, *[0] * (width - len(part))] for part in ids], device=device)
        start_U1 = torch.tensor(starts, device=device)[:, None]
        positions_UQ = start_U1 + torch.arange(width, device=device)
        slot_U = torch.tensor(places, device=device) + base
        longest = max(starts) + width
        slots.make_room(len(slots.lengths), longest)
        slots.write_at(slot_U, positions_UQ)
        slots.is_fresh, slots.rows, slots.num_attended = max(starts) == 0, slot_U, longest
        mask = None
        if not slots.is_fresh:
            for place in places:
                prefix = started[place]
                for layer, (keys, values) in zip(self._cache.slot_layers, prefix.parked, strict=True):
                    layer.put_back(base + place, keys, values, prefix.num_tokens)
            seen = torch.arange(longest, device=device) <= positions_UQ[:, :, None]
            mask = torch.where(seen, 0.0, -torch.inf).to(self._model.dtype)[:, None]
        last_U = torch.tensor([len(part) - 1 for part in ids], device=device)
        logits_UV = self._forward(ids_UQ, positions_UQ, mask, last_U)
        self.routes = [found[: len(part)] for found, part in zip(self.routes, ids, strict=False)]
        return logits_UV

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, last_U: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model on [U, Q] tokens and return the [U, V] logits after the last of each."""
        masks: Any = mask
        if mask is not None and self._window is not None:
            near = torch.arange(mask.shape[-1], device=mask.device) > positions[:, None, :, None] - self._window
            masks = torch.where(near, mask, -torch.inf)
            if self._has_types:
                masks = {"full_attention": mask, "sliding_attention": masks}
        head = self._model.get_output_embeddings()
        hook = None
        if last_U is not None and ids.shape[1] > 1:
            # The logits of all tokens of a prompt would take more memory than all else.
            rows = torch.arange(len(last_U), device=last_U.device)
            hook = head.register_forward_pre_hook(lambda _, args: (args[0][rows, last_U][:, None], *args[1:]))
        arguments: dict[str, Any] = {"position_ids": positions, "past_key_values": self._cache}
        try:
            output = self._model(
                input_ids=ids,
                attention_mask=masks,
                use_cache=True,
                **{name: value for name, value in arguments.items() if name in self._accepted},
            )
        finally:
            if hook is not None:
                hook.remove()
        logits: torch.Tensor = output.logits
        if self._recorder is not None:
            self.routes = list(self._recorder.last(len(ids)))
        return logits[:, -1]


def _chunks(order: list[int], contexts: Sequence[tuple[int, ...]], started: dict[int, Prefix]) -> list[list[int]]:
    """Divide rows into those that one forward reads: with a prefix or without, and not too many tokens."""
    chunks: list[list[int]] = []
    for place in order:
        chunk = chunks[-1] if chunks else []
        # Sorted by length: the last is the longest.
        is_full = (len(chunk) + 1) * len(contexts[place]) > _READ_AT_ONCE
        if not chunk or is_full or (place in started) != (chunk[0] in started):
            chunks.append([place])
        else:
            chunk.append(place)
    return chunks
