"""The weights of a Hugging Face folder: whether they are a model's, and rectangles read from its safetensors files."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from verl_engine.contract.errors import ModelError
from verl_engine.engine.base import WeightSpec

_LOG: Final = logging.getLogger(__name__)
_NUM_NAMED: Final = 10
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_EXPERT: Final = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight in a file, alone or in a stack of experts."""

    name: str
    whole: Any
    shape: tuple[int, ...]
    number: int | None = None
    first_row: int = 0

    def place(self, inner: tuple[slice, ...]) -> tuple[slice, ...]:
        """Say where in the file a rectangle of the weight is."""
        if self.number is None:
            return inner
        rows = slice(inner[0].start + self.first_row, inner[0].stop + self.first_row)
        return (slice(self.number, self.number + 1), rows, *inner[1:])


class WeightFolder:
    """Reads parts of a folder's weights; closes its files at the end of a ``with``.

    Experts are found by their own names also where the folder has them stacked, as transformers keeps them in memory.
    """

    def __init__(self, folder: Path) -> None:
        """Open all files, and read no weights; ModelError where one is missing or damaged, or there is none."""
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

    def __exit__(self, *failure: object) -> None:
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
        """Read no more than a rectangle of a weight that is there, on the CPU, in the folder's dtype.

        ModelError where the data is damaged, or in a dtype for quantized numbers.
        """
        stored = self._stored(name)
        rows = zip(offsets, shape, strict=True)
        inner = tuple(slice(begin, begin + length) for begin, length in rows)
        try:
            part: torch.Tensor = stored.whole[stored.place(inner)]
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


def missing_weights(found: WeightFolder, specs: Mapping[str, WeightSpec], optional: AbstractSet[str]) -> set[str]:
    """Return which optional weights a folder lacks. Every rank looks at all weights, and finds the same.

    Raises:
        ModelError: it lacks others, or has a weight in another shape.
    """
    there = {name for name in specs if found.stored_name(name) is not None}
    missing = specs.keys() - there
    if missing - optional:
        raise ModelError(
            f"model folder {found.folder} lacks {_some(missing - optional)}; it holds {_some(found.names) or 'nothing'}"
        )
    wrong = {
        f"{name} has shape {found.shape(name)} instead of {specs[name].shape}"
        for name in there
        if found.shape(name) != specs[name].shape
    }
    if wrong:
        raise ModelError(f"model folder {found.folder}: weights do not fit its config.json: {_some(wrong)}")
    return missing


def report(folder: Path, specs: Mapping[str, WeightSpec], missing: AbstractSet[str], needless: str) -> None:
    """Say what of the folder and the model did not meet; the folder may have the weight `needless` all the same."""
    if missing:
        _LOG.warning("model folder %s lacks %s: drawn anew, by engine.seed", folder, _some(missing))
    with WeightFolder(folder) as found:
        used = {found.stored_name(name) for name in specs}
        unexpected = found.names - used - {needless}
    if unexpected:
        _LOG.warning("model folder %s holds weights that the model does not have: %s", folder, _some(unexpected))


def _some(names: AbstractSet[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(sorted(names)[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
