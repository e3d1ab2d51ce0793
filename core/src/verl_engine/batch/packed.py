"""A micro-batch as tensors, T tokens of N sequences: laid end to end, never padded, never mixed."""

from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Neighbouring sequences of one length: attention can take them as one dense batch, without a copy."""

    start: int
    """Index of the first token."""
    num_sequences: int
    length: int

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.start + self.num_sequences * self.length


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The sequences of one micro-batch end to end; a value at index t speaks of token t (see `Sequence`)."""

    input_ids: torch.Tensor
    """[T] int64."""
    position_ids: torch.Tensor
    """[T] int64, or [axes, T]: the sequences' own positions, or 0, 1, 2 and so on, anew with each sequence."""
    loss_mask: torch.Tensor
    """[T] bool; False on the first token of each sequence."""
    fields: dict[str, torch.Tensor]
    """Further per-token values by name, each [T] or [T, ...], in the dtype of the sequences' own."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, in the order in which they lie here."""
    order: tuple[int, ...]
    """``order[i]`` is the index, in the list given, of the i-th sequence here."""
    loss_positions: torch.Tensor
    """[number of loss tokens] int64; where ``loss_mask`` is True, found on the host so that no device has to wait."""
    has_own_positions: bool = False
    """Whether ``position_ids`` came with the sequences."""
    top_k: int = 0
    """How many of each distribution's most likely ids a forward is to find, with their log-probs. At 0 it gives the
    log-probs of those that the field ``top_k_ids`` names, if there is one."""
    highest_id: int = 0
    """Of all token ids, those of ``top_k_ids`` among them."""

    @classmethod
    def from_sequences(cls, sequences: list[Sequence], device: torch.device | str = "cpu", top_k: int = 0) -> Self:
        """Pack sequences, sorted by length so that those of equal length are neighbours.

        An empty list gives one sequence of one token outside the loss: such a micro-batch adds nothing to the gradient,
        but still takes part in every collective.

        Raises:
            BatchError: `top_k` is below 0, or the sequences do not all have the same fields, of the same shapes and
                dtypes, and positions of equally many axes.
        """
        if top_k < 0:
            raise BatchError(f"top_k={top_k} ids of each distribution; use 0 or more")
        if not sequences:
            return cls.from_sequences([Sequence(np.zeros(1, np.int64), np.zeros(1, np.bool_))], device, top_k)
        kinds = [_kind(sequence) for sequence in sequences]
        for index, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise BatchError(f"sequence {index} has {_text(kind)}, but sequence 0 has {_text(kinds[0])}")
        own_positions = sequences[0].positions is not None
        order = tuple(sorted(range(len(sequences)), key=lambda index: len(sequences[index])))
        laid = [sequences[index] for index in order]
        lengths = tuple(len(sequence) for sequence in laid)
        loss_mask = np.concatenate([sequence.loss_mask for sequence in laid])
        return cls(
            input_ids=torch.from_numpy(np.concatenate([sequence.token_ids for sequence in laid])).to(device),
            position_ids=torch.from_numpy(np.concatenate([_positions(sequence) for sequence in laid], axis=-1)).to(
                device
            ),
            loss_mask=torch.from_numpy(loss_mask).to(device),
            fields={
                name: torch.from_numpy(np.concatenate([sequence.fields[name] for sequence in laid])).to(device)
                for name in sorted(sequences[0].fields)
            },
            lengths=lengths,
            order=order,
            loss_positions=torch.from_numpy(np.flatnonzero(loss_mask)).to(device),
            has_own_positions=own_positions,
            top_k=top_k,
            highest_id=max(map(_highest_id, laid)),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def num_loss_sequences(self) -> int:
        """How many sequences have a loss token; the host waits for the device."""
        ends = torch.tensor(self.lengths, device=self.loss_positions.device).cumsum(0)
        return len(torch.searchsorted(ends, self.loss_positions, right=True).unique())

    @property
    def segment_runs(self) -> tuple[SegmentRun, ...]:
        """The sequences grouped into runs of equal length, in order.

        Each has `num_sequences`, their ``length``, and ``start`` and ``stop``: its first token, and the one after.
        """
        runs: list[SegmentRun] = []
        start = 0
        for length, same in groupby(self.lengths):
            run = SegmentRun(start, len(list(same)), length)
            runs.append(run)
            start = run.stop
        return tuple(runs)

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split per-token values into one tensor per sequence, in the order of the list given to `from_sequences`.

        Args:
            values: [T] or [T, ...], any dtype.
        Returns:
            N views into `values`, each [L] or [L, ...].
        """
        parts = values.split(list(self.lengths))
        result: list[torch.Tensor] = [values] * len(parts)
        for at, index in enumerate(self.order):
            result[index] = parts[at]
        return result


def _highest_id(sequence: Sequence) -> int:
    chosen = sequence.fields.get("top_k_ids")
    return int(max(sequence.token_ids.max(), 0 if chosen is None else chosen.max(initial=0)))


def _positions(sequence: Sequence) -> npt.NDArray[np.int64]:
    """Return [L] or [axes, L]."""
    return np.arange(len(sequence)) if sequence.positions is None else sequence.positions


def _kind(sequence: Sequence) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return what must be alike for all sequences of a micro-batch: trailing shape and dtype of each field."""
    found = {name: (array.shape[1:], str(array.dtype)) for name, array in sequence.fields.items()}
    if sequence.positions is not None:
        found["positions of its own"] = (sequence.positions.shape[:-1], "int64")
    return found


def _text(kind: dict[str, tuple[tuple[int, ...], str]]) -> str:
    fields = [f"{name} {dtype}{list(shape) if shape else ''}" for name, (shape, dtype) in sorted(kind.items())]
    return f"fields {', '.join(fields)}" if fields else "no fields"
