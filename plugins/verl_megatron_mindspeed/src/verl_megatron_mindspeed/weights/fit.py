"""Whether a folder's weights are the model's."""

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from verl_engine.contract.errors import ModelError
from verl_engine.engine.base import WeightSpec
from verl_megatron_mindspeed.weights.folder import WeightFolder

_LOG = logging.getLogger(__name__)
_NUM_NAMED: Final = 10


def missing_weights(found: WeightFolder, specs: Mapping[str, WeightSpec], optional: AbstractSet[str]) -> set[str]:
    """Return which weights a folder lacks. Every rank looks at all of them, and so all find the same.

    Args:
        found: the folder.
        specs: the model's weights, by name.
        optional: names of those that may be missing.
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
    """Say what of the folder and the model did not meet.

    Args:
        folder: of the model.
        specs: the model's weights, by name.
        missing: those that the folder lacks.
        needless: one that the folder may have without an error.
    """
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
