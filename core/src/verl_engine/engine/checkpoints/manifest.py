"""What a checkpoint says of itself in ``checkpoint.json``; imports no torch."""

from __future__ import annotations

import dataclasses
import json
import time
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from verl_engine import __version__
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.engine.checkpoints.folders import MANIFEST, require_whole, write_file
from verl_engine.engine.weights.model_files import side_files
from verl_engine.host.catalog import list_plugins

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.contract.engine_config import EngineConfig

FORMAT_VERSION: Final = 1
MODEL_FOLDER: Final = "model"
"""Holds config and tokenizer files of the model folder that the engine was made from."""


_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "step": int,
    "backend": str,
    "distribution": str,
    "world_size": int,
    "user_state": dict,
    "lora": (dict, NoneType),
    "head": str,
    "saved_at": (int, float),
}
"""Of those fields that others than this file use, what JSON may give."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedWeight:
    """One weight in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    """Such as ``float32``."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """All that can be known of a checkpoint without loading it."""

    step: int
    backend: str
    distribution: str
    """Of the backend, with its version; empty where it is not known."""
    world_size: int
    contents: tuple[str, ...]
    """Which of ``model``, ``buffers``, ``optimizer``, ``schedule``, ``loss_scaler`` and ``rng`` are there."""
    weights: dict[str, SavedWeight]
    user_state: dict[str, Any]
    lora: dict[str, float] | None = None
    """``rank`` and ``alpha`` of the adapters, if there are any."""
    head: str = "language_model"
    saved_at: float = 0.0
    """Seconds since 1970."""
    core_version: str = __version__
    format_version: int = FORMAT_VERSION

    @classmethod
    def describe(
        cls,
        config: EngineConfig,
        step: int,
        world_size: int,
        contents: tuple[str, ...],
        weights: dict[str, SavedWeight],
        user_state: dict[str, Any],
    ) -> CheckpointManifest:
        """Describe what was just written."""
        lora = config.lora
        return cls(
            step=step,
            backend=config.backend,
            distribution=_distribution(config.backend),
            world_size=world_size,
            contents=contents,
            weights=weights,
            user_state=user_state,
            lora=None if lora is None else {"rank": lora.rank, "alpha": lora.alpha},
            head=config.head,
            saved_at=time.time(),
        )

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        write_file(folder / MANIFEST, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Read that of a whole checkpoint.

        Raises:
            WeightsError: there is none, it cannot be read, or another version of the format wrote it.
        """
        path = require_whole(folder) / MANIFEST
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields["format_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if version != FORMAT_VERSION:
            raise WeightsError(
                f"{path}: format_version={version}, written by verl-engine-core {fields.get('core_version', '?')}; "
                f"this is {__version__}, which reads version {FORMAT_VERSION}: use the core that wrote it"
            )
        try:
            weights = {
                name: SavedWeight(tuple(weight["shape"]), weight["dtype"])
                for name, weight in fields.pop("weights").items()
            }
            found = cls(**{**fields, "weights": weights, "contents": tuple(fields["contents"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path} lacks a field, or has one too many: {error}") from error
        for field, kind in _KINDS.items():
            if not isinstance(getattr(found, field), kind):
                raise WeightsError(f"{path}: {field}={getattr(found, field)!r} cannot be; the file was damaged")
        return found


def check_user_state(user_state: dict[str, Any]) -> str:
    """Return the user's state as JSON.

    Raises:
        ConfigError: it would not come back as it is, such as a tuple, a key that is no string, or a NaN.
    """
    if not isinstance(user_state, dict):
        raise ConfigError(f"user_state must be a dict, and is {type(user_state).__name__}")
    try:
        text = json.dumps(user_state, allow_nan=False)
        is_kept = json.loads(text) == user_state
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"user_state cannot be written as JSON: {error}; give plain dicts, lists and values"
        ) from error
    if not is_kept:
        raise ConfigError(
            "user_state would come back from JSON as something else; give dicts with strings as keys, and lists in "
            "place of tuples"
        )
    return text


def copy_model_files(model_folder: Path, target: Path) -> None:
    """Copy config and tokenizer files, and code, of a model folder into another: all but weights."""
    target.mkdir(exist_ok=True)
    for path in side_files(model_folder):
        copy = target / path.relative_to(model_folder)
        copy.parent.mkdir(exist_ok=True)
        write_file(copy, path.read_bytes())


def _distribution(backend: str) -> str:
    """Name the distribution that offers a backend, with its version."""
    found = (entry for entry in list_plugins(BACKENDS_GROUP) if entry.name == backend)
    return next((f"{entry.distribution} {entry.version}" for entry in found), "")
