"""Low-rank adapters through peft, injected in place: nothing but the adapted layers changes, and they keep their names.

A layer ``q_proj`` becomes ``q_proj.base_layer.weight`` (frozen), ``q_proj.lora_A.default.weight`` and
``q_proj.lora_B.default.weight``. peft is imported where adapters are asked for, and nowhere else.

Shape legend: I inputs and O outputs of a layer, R the adapter's rank.
"""

import copy
import importlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import PreTrainedModel

from verl_engine.contract.engine_config import LoraConfig
from verl_engine.contract.errors import ModelError
from verl_engine.engine.weights.module_weights import Exported, LowRank, kept_by_first_rank, write_folder
from verl_fsdp.model.linear_layers import linear_layers, value_head

ADAPTER: Final = "default"
"""peft's name for the adapter, a part of its weights' names."""
_BASE: Final = ".base_layer."
_LOG: Final = logging.getLogger(__name__)


def inject_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Put an adapter beside each chosen layer, in place; freeze all else but a value head.

    The adapter begins without effect: B is 0, and A is drawn by `seed`, which leaves this process's random numbers as
    they are. A model on the meta device, before it is sharded, gets its adapters there too.

    Raises:
        ModelError: peft is missing, the model has no such linear layers, or peft adapts others.
    """
    peft = import_peft()
    targets = target_names(model, lora.target_modules)
    config = peft.LoraConfig(
        task_type="TOKEN_CLS" if value_head(model) else "CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path or None,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_short(model, targets),
    )
    head = value_head(model)
    plain_names = set(model.state_dict())
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    # A module without a config: for some types of models peft exchanges the layers asked for by others.
    holder = torch.nn.ModuleDict({"model": model})
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, holder, ADAPTER, low_cpu_mem_usage=on_meta)
    except Exception as error:  # peft raises all kinds
        raise ModelError(
            f"engine.lora.target_modules={list(lora.target_modules)}: peft cannot adapt {type(model).__name__}: {error}"
        ) from error
    cast("Any", model).peft_config = cast("Any", holder).peft_config
    _check_injected(model, targets, plain_names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter_weight(name) or name.split(".", 1)[0] == head)


def _check_injected(model: PreTrainedModel, targets: list[str], plain_names: set[str]) -> None:
    """Refuse adapters of other layers than asked for, and weights that would be exported under other names."""
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    exported = {name.replace(_BASE, ".") for name in model.state_dict() if not is_adapter_weight(name)}
    for what, found, expected in (("layers", adapted, set(targets)), ("weights", exported, plain_names)):
        if found != expected:
            raise ModelError(
                f"engine.lora: peft changed other {what} of {type(model).__name__} than asked for: "
                f"{sorted(found - expected)[:5]} in place of {sorted(expected - found)[:5]}; name other layers in "
                "engine.lora.target_modules"
            )


def import_peft() -> Any:
    """Import peft; ModelError, with the cause chained, where it is not installed, or broken."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ModelError(
            f"engine.lora needs the package peft, which cannot be imported ({error}); install it with: pip install peft"
        ) from error


def target_names(model: PreTrainedModel, patterns: tuple[str, ...]) -> list[str]:
    """Return the full names of the linear layers that get an adapter, in the model's order.

    Patterns are names, ends of names after a dot, or ``all-linear``; output layer and value head are never meant.
    ModelError where one fits no linear layer, or one that is not called as such.
    """
    adaptable, others = linear_layers(model)
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in adaptable if _fits(name, pattern)}
        refused = {name: why for name, why in others.items() if _fits(name, pattern)}
        if pattern == "all-linear" and fitting and refused:
            _LOG.warning("engine.lora.target_modules=all-linear leaves out %s", _listed(refused))
        elif refused:
            raise ModelError(
                f"engine.lora.target_modules={pattern!r} cannot be adapted in {type(model).__name__}: "
                f"{_listed(refused)}; " + ("leave it out, or use all-linear" if adaptable else "leave engine.lora out")
            )
        if not fitting:
            ends = sorted({name.rpartition(".")[2] for name in adaptable})
            raise ModelError(
                f"engine.lora.target_modules={pattern!r} fits no linear layer of {type(model).__name__}; they are "
                f"{', '.join(ends) or 'none'}, or all-linear{_fused(model, pattern)}"
            )
        chosen |= fitting
    return [name for name in adaptable if name in chosen]


def _fits(name: str, pattern: str) -> bool:
    return pattern == "all-linear" or f".{name}".endswith(f".{pattern}")


def _listed(refused: dict[str, str]) -> str:
    """Say which layers are not adapted and why, those of one last name once."""
    by_end = {name.rpartition(".")[2]: why for name, why in refused.items()}
    return ", ".join(f"{end} ({why})" for end, why in sorted(by_end.items()))


def _fused(model: torch.nn.Module, pattern: str) -> str:
    """Say where weights of experts are that somebody may have meant."""
    end = pattern.rpartition(".")[2].removesuffix("_proj")
    for name, parameter in model.named_parameters():
        held = name.rpartition(".")[2]
        if parameter.ndim == 3 and end in held.split("_"):  # noqa: PLR2004 - experts, outputs, inputs
            return f". Experts are fused in {held}, which is no linear layer and gets no adapter"
    return ""


@contextmanager
def adapters_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Run the model as if it had no adapters inside; afterwards they are as before, also after an exception."""
    layers = [cast("Any", module) for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            # peft's enable_adapters would also switch requires_grad, by which a snapshot knows what is trained.
            layer._disable_adapters = True  # noqa: SLF001
        yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled  # noqa: SLF001


def _short(model: torch.nn.Module, names: list[str]) -> list[str]:
    """Name layers by the last part alone where that says the same: a folder should not list hundreds."""
    ends = {name.rpartition(".")[2] for name in names}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    return sorted(ends) if meant == names else names


def low_rank_exports(exported: dict[str, Exported], lora: LoraConfig) -> dict[str, Exported]:
    """Turn exports of an adapted model into those of a plain one: plain names, each adapter merged into its weight."""
    suffix = f".{ADAPTER}.weight"
    plain: dict[str, Exported] = {}
    for name, entry in exported.items():
        if is_adapter_weight(name):
            continue
        layer, is_base, _ = name.partition(_BASE)
        a_RI = exported.get(f"{layer}.lora_A{suffix}") if is_base and name.endswith(".weight") else None
        low_rank = None
        if a_RI is not None:
            b_OR = exported[f"{layer}.lora_B{suffix}"]
            low_rank = LowRank(a_RI.tensor, b_OR.tensor, lora.alpha / lora.rank)
        plain[name.replace(_BASE, ".")] = Exported(entry.tensor, low_rank)
    return plain


def is_adapter_weight(name: str) -> bool:
    """Whether a weight of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def peft_name(name: str) -> str:
    """Return what peft's files call a weight of an adapted model."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def adapter_config(model: torch.nn.Module) -> dict[str, Any]:
    """Return what ``adapter_config.json`` says of an adapted model's adapter, in plain values."""
    config = copy.copy(cast("Any", model).peft_config[ADAPTER])
    config.inference_mode = True
    head = value_head(model)
    if head is not None:
        config.modules_to_save = [head]  # new in this model, so it travels with the adapter
    _warn_if_peft_reads_others(model, config)
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))  # it has sets
    return plain


def save_adapter(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model; see `write_folder`.

    Takes whole weights of all that is trained, by `peft_name`.
    Collectives: those of taking the weights, then a broadcast.
    """
    state = kept_by_first_rank(weights)
    config = json.dumps(adapter_config(model), indent=2, sort_keys=True)

    def write(partial: Path) -> None:
        from safetensors.torch import save_file  # comes with transformers

        partial.mkdir(parents=True)
        save_file(state, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(config, encoding="utf-8")

    write_folder(folder, write)


def _warn_if_peft_reads_others(model: torch.nn.Module, config: Any) -> None:
    """Say so where peft, under transformers 5, takes names of layers for those of experts that are fused there.

    Upstream: ``_MOE_TARGET_MODULE_MAPPING`` of peft 0.21, which knows a shared expert's gate_proj by its name alone.
    """
    try:
        conversion = importlib.import_module("peft.utils.transformers_weight_conversion")
    except ImportError:
        return  # an older release, which takes names as they are
    read = copy.deepcopy(config)
    with suppress(ValueError):  # it wants all that it would fuse, or none
        conversion.convert_peft_config_for_transformers(read, model, None)
        if set(read.target_modules) == set(config.target_modules):
            return
    _LOG.warning(
        "peft will not load this adapter as it is: for models of type %s it takes %s for layers that transformers "
        "fuses into experts; use the merged model of save_pretrained",
        cast("Any", model).config.model_type,
        ", ".join(sorted(config.target_modules)),
    )
