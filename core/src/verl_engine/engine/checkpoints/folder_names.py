"""What Hugging Face folders call weights that transformers holds otherwise, such as experts that a module fuses."""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from verl_engine.engine.weights.held_dtypes import held_dtypes

_log: Final = logging.getLogger(__name__)


class FolderNames:
    """Translates weights for one kind of model. Without transformers, or for a model it does not know, none changes."""

    def __init__(self, model_folder: Path, head: str) -> None:
        """Build the model of a folder's ``config.json``, without weights, to ask it; a critic's head is ``value``."""
        self._revert: Any = None
        self._model: Any = None
        try:
            # By name: all that engines share works without a model library.
            transformers = importlib.import_module("transformers")
            self._revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
            config = transformers.AutoConfig.from_pretrained(
                model_folder, local_files_only=True, trust_remote_code=False
            )
            kind = "AutoModelForTokenClassification" if head == "value" else "AutoModelForCausalLM"
            with torch.device("meta"):
                self._model = getattr(transformers, kind).from_config(
                    config, attn_implementation="eager", trust_remote_code=False
                )
        except Exception as error:  # noqa: BLE001 - missing, older, or its config refused: it raises all kinds
            self._give_up(error)

    def translated(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename weights, and take apart or join those that are cut otherwise in a folder; see `together`."""
        if self._model is None:
            return weights
        found: dict[str, torch.Tensor] = self._revert(self._model, weights)
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def held_dtypes(self, dtype: torch.dtype | None) -> Mapping[str, torch.dtype]:
        """Say which weights transformers does not cast to a dtype; none where it does not know the model."""
        return {} if dtype is None else held_dtypes(self._model, dtype)

    def together(self, shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
        """Group names so that what becomes one weight in the folder is translated at once."""
        try:
            return self._groups(shapes)
        except Exception as error:  # noqa: BLE001 - transformers' own, for weights of another model than the config's
            self._give_up(error)
            return [[name] for name in shapes]

    def _groups(self, shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
        group_of: dict[str, list[str]] = {}
        groups: list[list[str]] = []
        for name, shape in shapes.items():
            names = list(self.translated({name: torch.empty(shape, device="meta")}))
            group = next((group_of[new] for new in names if new in group_of), None)
            if group is None:
                groups.append(group := [])
            group.append(name)
            group_of |= dict.fromkeys(names, group)
        return groups

    def _give_up(self, error: Exception) -> None:
        self._model = None
        _log.warning(
            "transformers cannot say how a folder of this model names its weights (%s: %s); they keep the names that "
            "they have in the module, which other tools may not know where experts are fused",
            type(error).__name__,
            error,
        )
