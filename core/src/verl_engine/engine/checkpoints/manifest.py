"""What a checkpoint says of itself in ``checkpoint.json``; imports no torch."""

import hashlib
import json
import logging
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
)

from verl_engine import __version__
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.contract.strict_model import StrictModel
from verl_engine.engine.checkpoints.digests import FileName, SavedFile, require_intact, short_file
from verl_engine.engine.checkpoints.folders import MANIFEST, named_step, names_in, require_whole, write_file
from verl_engine.engine.weights.model_files import side_files

_log: Final = logging.getLogger(__name__)
FORMAT_VERSION: Final = 2
_READ_VERSIONS: Final = (1, 2)
"""The first had no checksums."""
_OWN: Final = "sha256"
"""Key of the manifest's own digest, over all other fields."""
MODEL_FOLDER: Final = "model"
"""Holds config and tokenizer files of the model folder that the engine was made from."""


class SavedWeight(StrictModel):
    """One weight in a checkpoint."""

    shape: tuple[NonNegativeInt, ...]
    dtype: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
    """Such as ``float32``."""


class SavedAdapters(StrictModel):
    """How much the adapters in a checkpoint count."""

    rank: PositiveInt
    alpha: PositiveFloat


class CheckpointManifest(StrictModel):
    """All that can be known of a checkpoint without loading it."""

    step: NonNegativeInt
    backend: Annotated[str, StringConstraints(min_length=1)]
    distribution: str
    """Of the backend, with its version; empty where it is not known."""
    world_size: PositiveInt
    contents: tuple[str, ...]
    """Which of ``model``, ``buffers``, ``optimizer``, ``schedule``, ``loss_scaler`` and ``rng`` are there."""
    weights: dict[str, SavedWeight]
    user_state: dict[str, Any]
    lora: SavedAdapters | None = None
    """Of the adapters, if there are any."""
    head: Literal["language_model", "value"] = "language_model"
    saved_at: NonNegativeFloat = 0.0
    """Seconds since 1970."""
    files: dict[FileName, SavedFile] = Field(default_factory=dict)
    """All others of the checkpoint. Empty in format version 1, which had no checksums."""
    core_version: str = __version__
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, with a digest of itself."""
        fields = self.model_dump(mode="json")
        write_file(folder / MANIFEST, (json.dumps({**fields, _OWN: _digest(fields)}, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read that of a whole checkpoint.

        A WeightsError where there is none, or not what was written, or one of another format version, or of another
        step than the folder's name says.
        """
        path = require_whole(folder) / MANIFEST
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            version = fields["format_version"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise WeightsError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if version not in _READ_VERSIONS:
            readable = " and ".join(map(str, _READ_VERSIONS))
            raise WeightsError(
                f"{path}: format_version={version}, written by verl-engine-core {fields.get('core_version', '?')}; "
                f"this is {__version__}, which reads versions {readable}: use the core that wrote it"
            )
        own = fields.pop(_OWN, None)
        try:
            found = cls.model_validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"]))
            raise WeightsError(
                f"{path}: {field}={problem['input']!r:.200} cannot be: {problem['msg']}; the file was damaged, load "
                "another step"
            ) from error
        if version > 1 and own != _digest(fields):
            raise WeightsError(f"{path} holds something else than was saved (its SHA-256 differs); load another step")
        if named_step(folder) not in (None, found.step):
            raise WeightsError(f"{folder} holds the checkpoint of step {found.step}, not that of its name")
        return found

    def require_intact(
        self, folder: Path, *, part: int = 0, num_parts: int = 1, num_threads: int = 1, is_quick: bool = False
    ) -> None:
        """Make sure that the checkpoint's files are those that were saved; see `digests.require_intact`.

        Ranks divide the work: each looks at its `part` of `num_parts`.
        """
        if self.format_version == 1 and part == 0:
            _log.warning("%s was written before checkpoints had checksums: what it holds cannot be checked", folder)
        largest_first = sorted(self.files, key=lambda name: -self.files[name].num_bytes)
        files = {name: self.files[name] for name in largest_first[part::num_parts]}
        require_intact(folder, files, num_threads=num_threads, is_quick=is_quick)

    def model_files(self, folder: Path) -> list[str]:
        """Return the names of the config and tokenizer files that were saved, all of them inside the folder."""
        names = [name for name in self.files or names_in(folder) if name.startswith(f"{MODEL_FOLDER}/")]
        damage = short_file(folder, dict.fromkeys(names, 0))
        if damage:
            raise WeightsError(f"{folder} is damaged: {damage}; load another step")
        return [name.removeprefix(f"{MODEL_FOLDER}/") for name in names]


def check_user_state(user_state: dict[str, Any]) -> str:
    """Return the user's state as JSON; a ConfigError where it would come back otherwise, such as a tuple or a NaN."""
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


def copy_model_files(model_folder: Path, target: Path, names: Container[str] | None = None) -> None:
    """Copy config and tokenizer files, and code, of a model folder into another: all but weights; or those of `names`.

    Links are followed: in a hub's cache all files are links.
    """
    target.mkdir(exist_ok=True)
    for path in side_files(model_folder):
        name = path.relative_to(model_folder)
        if names is None or name.as_posix() in names:
            (target / name).parent.mkdir(exist_ok=True)
            write_file(target / name, path.read_bytes())


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
