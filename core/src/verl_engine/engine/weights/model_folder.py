"""A trained model as a Hugging Face folder: weights by transformers, first; then what the model's own folder holds."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from verl_engine.engine.weights.model_files import ModelFiles, saved_config
from verl_engine.engine.weights.module_weights import is_first_rank, kept_by_first_rank, write_folder

_log: Final = logging.getLogger(__name__)


class ModelFolderWriter:
    """Writes a model of transformers. What is not weights is read when this is made, and does not fail later."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Read the files of the folder that the model was loaded from, on the first rank."""
        source = getattr(getattr(model, "config", None), "name_or_path", None)
        self._files = ModelFiles.read(Path(source)) if source and is_first_rank() else ModelFiles({})

    def write(self, model: Any, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
        """Write a folder in the place of what is there; see `write_folder`. The first rank copies all to the CPU.

        Collectives: those of taking the weights, then a broadcast.
        """
        state = kept_by_first_rank(weights)
        source = self._files.config()

        def write(partial: Path) -> None:
            if source is None:  # made in memory: there is nothing but what the library writes
                model.save_pretrained(partial, state_dict=state)
                return
            dtype = main_dtype(tensor.dtype for tensor in state.values())
            _write_weights(model, state, partial)
            name = type(model).__name__.removeprefix("FSDP")  # fully_shard makes a class of its own
            is_critic = name.endswith("ForTokenClassification")
            self._files.write(partial, saved_config(_own(source, model.config), dtype, [name], is_critic=is_critic))

        write_folder(folder, write)


def write_model_folder(
    weights: Iterable[tuple[str, torch.Tensor]], files: ModelFiles, folder: Path, architectures: Sequence[str] = ()
) -> None:
    """Write a Hugging Face folder where the model is not one of transformers. Every rank calls it; the first writes.

    Args:
        weights: full ones, under Hugging Face names, tied ones once, as `Engine.full_weights` yields them. The first
            rank keeps a copy of all of them on the CPU meanwhile, the others of none.
        files: of the folder that the model was loaded from; config.json is written as it was there, but for the dtype.
        folder: replaced if it exists, when the new one is whole.
        architectures: of transformers, which read the weights; by default those that config.json names.
    Raises:
        WeightsError: the first rank could not write it.
    Collectives: those of taking the weights, then a broadcast.
    """
    state = kept_by_first_rank(weights)
    config = files.config() or {}
    is_critic = any("Classification" in name for name in architectures or config.get("architectures") or ())

    def write(partial: Path) -> None:
        from huggingface_hub import save_torch_state_dict  # comes with transformers

        partial.mkdir(parents=True)
        save_torch_state_dict(state, partial)
        dtype = main_dtype(tensor.dtype for tensor in state.values())
        files.write(partial, saved_config(config, dtype, architectures, is_critic=is_critic))

    write_folder(folder, write)


def _write_weights(model: Any, state: dict[str, torch.Tensor], partial: Path) -> None:
    """Let transformers write the weights; where it cannot name them as folders do, they keep the names they have."""
    try:
        with _weights_only(model):
            model.save_pretrained(partial, state_dict=dict(state))
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, a trained model is not to be lost by it
        from safetensors.torch import save_file  # comes with transformers

        _log.warning("transformers cannot write the model (%s: %s): saved as it is", type(error).__name__, error)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        whole = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(whole, partial / "model.safetensors", {"format": "pt"})


def main_dtype(dtypes: Iterable[torch.dtype]) -> str:
    """Return the floating-point dtype that most weights have, as config.json spells it."""
    found = Counter(dtype for dtype in dtypes if dtype.is_floating_point)
    return str(found.most_common(1)[0][0] if found else torch.float32).removeprefix("torch.")


def _own(source: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return what a folder's config says of the model, which may be the language model inside another one."""
    inner = source.get("text_config")
    if source.get("model_type") == config.model_type or not isinstance(inner, dict):
        return source
    return {**config.to_diff_dict(), **inner, "model_type": config.model_type}


@contextmanager
def _weights_only(model: Any) -> Iterator[None]:
    """Keep ``save_pretrained`` from writing configs: it does so before the weights, and refuses some that it reads."""
    configs = [part for part in (model.config, getattr(model, "generation_config", None)) if part is not None]
    for config in configs:
        vars(config)["save_pretrained"] = lambda *_, **__: None
    try:
        yield
    finally:
        for config in configs:
            del vars(config)["save_pretrained"]
