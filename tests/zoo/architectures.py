"""Tiny random models of transformers' causal architectures: which there are, and how each is made."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo.sizes import FIELDS, KIND_LISTS, MLA, OVERRIDES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedConfig

MAX_PARAMETERS: Final = 2_000_000
_PLAIN_STD: Final = (0.001, 0.15)
"""Weights whose spread lies within were drawn by ``initializer_range``: so small that nothing would matter."""
_TINY_STD: Final = 0.2


def names() -> list[str]:
    """Every architecture that the installed transformers can build from a config, one of those that share a class."""
    by_class: dict[str, str] = {}
    for name, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name not in SKIPPED:
            by_class.setdefault(str(model_class), name)
    return list(by_class.values())


def config_of(name: str) -> PreTrainedConfig:
    """Make a config of few, small layers, one of each kind that the architecture has by default."""
    default = AutoConfig.for_model(name)
    fields = default.to_dict().keys() | type(default).attribute_map.keys()
    settings = {field: value for field, value in FIELDS.items() if field in fields}
    settings |= _kinds_of_layers(default)
    if "kv_lora_rank" in fields:
        settings |= MLA
    if "is_decoder" in fields:
        settings["is_decoder"] = True
    config: PreTrainedConfig = AutoConfig.for_model(name, **(settings | copy.deepcopy(OVERRIDES.get(name, {}))))
    return config


def write(name: str, folder: Path, seed: int = 0) -> None:
    """Write a model whose every part matters: weights are large enough, and no bias or scale is at rest."""
    config = config_of(name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert size <= MAX_PARAMETERS, f"{name} has {size} parameters: add what makes it big to tests/zoo/sizes.py"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in _weights(model):
                if weight.ndim < 2:
                    weight.add_(0.05 * torch.randn_like(weight))
                elif _PLAIN_STD[0] < weight.std() < _PLAIN_STD[1]:
                    weight.mul_(_TINY_STD / weight.std())
                    weight[weight.abs().flatten(1).sum(1) == 0] = _TINY_STD  # the token for padding; it is drawn too
        model.save_pretrained(folder)


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    saved = model.state_dict()
    yield from (buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point())


def _kinds_of_layers(default: PreTrainedConfig) -> dict[str, Any]:
    """Keep one layer of each kind."""
    found = {field: values for field, values in default.to_dict().items() if field in KIND_LISTS}
    kinds = {field: list(dict.fromkeys(values)) for field, values in found.items() if values}
    if not kinds:
        return {}
    num_layers = max(2, *map(len, kinds.values()))
    return {"num_hidden_layers": num_layers} | {
        field: (values + [values[-1]] * num_layers)[:num_layers] for field, values in kinds.items()
    }
