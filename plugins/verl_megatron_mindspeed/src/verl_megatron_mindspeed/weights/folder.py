"""The weights of a Hugging Face folder: rectangles read from its safetensors files."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from verl_engine.contract.errors import ModelError

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_EXPERT: Final = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


class _Stored:
    """A weight in a file, alone or in a stack of experts."""

    def __init__(
        self, name: str, whole: Any, shape: tuple[int, ...], number: int | None = None, first_row: int = 0
    ) -> None:
        self.name = name
        self.slice = whole
        self.shape = shape
        self._number = number
        self._first_row = first_row

    def place(self, inner: tuple[slice, ...]) -> tuple[slice, ...]:
        """Say where in the file a rectangle of the weight is."""
        if self._number is None:
            return inner
        rows = slice(inner[0].start + self._first_row, inner[0].stop + self._first_row)
        return (slice(self._number, self._number + 1), rows, *inner[1:])


class WeightFolder:
    """Reads parts of a folder's weights; closes its files at the end of a ``with``.

    Experts are found by their own names also where the folder has them stacked, as transformers keeps them in memory.
    """

    def __init__(self, folder: Path) -> None:
        """Open all files and read what is in them, but no weights.

        Raises:
            ModelError: there are no safetensors files, or one is missing or damaged.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        with ExitStack() as opened:
            try:
                for path in _paths(folder):
                    file = opened.enter_context(safe_open(path, framework="pt"))
                    self._files.update(dict.fromkeys(file.keys(), file))
            except ModelError:
                raise
            except Exception as error:  # a damaged file or index raises all kinds
                raise ModelError(f"model folder {folder}: its weights cannot be read: {error}") from error
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self._opened.close()

    @property
    def names(self) -> set[str]:
        """Of all weights, as they are in the files."""
        return set(self._files)

    def stored_name(self, name: str) -> str | None:
        """Return under which name the folder holds a weight, alone or in a stack; None where it does not."""
        return None if (stored := self._find(name)) is None else stored.name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight that is there."""
        return self._stored(name).shape

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a rectangle of a weight that is there; no more than that is read.

        Returns:
            On the CPU, in the folder's dtype.
        Raises:
            ModelError: the data is damaged, or in a dtype for quantized numbers.
        """
        stored = self._stored(name)
        rows = zip(offsets, shape, strict=True)
        inner = tuple(slice(begin, begin + length) for begin, length in rows)
        try:
            part: torch.Tensor = stored.slice[stored.place(inner)]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model folder {self.folder}: {name} cannot be read: {error}") from error
        if not part.is_floating_point() or part.itemsize == 1:
            raise ModelError(
                f"model folder {self.folder}: {name} is stored as {part.dtype}; start from a folder whose weights are "
                "float32, bfloat16 or float16"
            )
        return part.view(tuple(shape))

    def _stored(self, name: str) -> _Stored:
        stored = self._find(name)
        assert stored is not None, f"nobody asked whether {name} is there"
        return stored

    def _find(self, name: str) -> _Stored | None:
        if name in self._files:
            whole = self._files[name].get_slice(name)
            return _Stored(name, whole, tuple(whole.get_shape()))
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return None
        stack = f"{expert['experts']}.{'down_proj' if expert['part'] == 'down' else 'gate_up_proj'}"
        if stack not in self._files:
            return None
        whole = self._files[stack].get_slice(stack)
        _, num_rows, num_columns = whole.get_shape()
        if expert["part"] != "down":
            num_rows //= 2
        first_row = num_rows if expert["part"] == "up" else 0
        return _Stored(stack, whole, (num_rows, num_columns), int(expert["number"]), first_row)


def _paths(folder: Path) -> Iterator[Path]:
    """Yield the files that hold weights."""
    if (folder / _SINGLE).is_file():
        yield folder / _SINGLE
    elif (folder / _INDEX).is_file():
        files = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        yield from (folder / name for name in sorted(set(files)))
    else:
        raise ModelError(
            f"model folder {folder} has neither {_SINGLE} nor {_INDEX}; weights of other formats are not read: load "
            "the model in transformers once, and save it again"
        )
