"""Which modules are gathered and freed one by one."""

import difflib
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from verl_engine.contract.errors import ConfigError, ModelError
from verl_fsdp.config import TorchSharding
from verl_fsdp.model.lora import is_adapter_weight

_LOG = logging.getLogger(__name__)
_NUM_NAMED = 20


def blocks(model: PreTrainedModel, config: TorchSharding) -> list[torch.nn.Module]:
    """Return the modules of the classes in ``wrap``, or those that the model's authors say must stay whole.

    In the order in which they are to be sharded: of two that lie one inside the other the inner comes first, else the
    order is the model's. The model itself is never among them: it is what is left for the end.

    Raises:
        ConfigError: ``wrap`` names a class that the model has none of, or modules that cannot be sharded alone.
        ModelError: the model's authors name none.
    """
    if config.wrap:
        chosen = _named(model, config.wrap)
        if config.compile and not chosen:
            raise ConfigError(
                f"engine.compile=true with engine.wrap={list(config.wrap)}: blocks are compiled, and the model itself "
                "is none; name the class of its layers in engine.wrap, or leave wrap out"
            )
        return chosen
    return own_blocks(model, "name the classes of its layers in engine.wrap")


def own_blocks(model: PreTrainedModel, remedy: str) -> list[torch.nn.Module]:
    """Return the modules that the model's authors say must stay whole, or else its layers; see `blocks`.

    Where there are none, ModelError says `remedy`, and lists the classes of the model's modules after it.
    """
    names = _no_split_modules(model)
    found = _of_classes(model, names) or [layer for _, _, layers in layer_lists(model) for layer in layers]
    tied = tied_outside(model, found)
    if tied:
        _LOG.info("not sharded one by one, for they share weights with other modules: %s", ", ".join(sorted(tied)))
    alone = [module for module in found if id(module) not in tied.values()]
    if not alone:
        raise ModelError(
            f"{type(model).__name__} names no block to shard (_no_split_modules={sorted(names)}, of which it has "
            f"{len(found)}); {remedy}: {_classes(model, '')}"
        )
    return alone


def in_sharding_order(model: torch.nn.Module, *chosen: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Merge lists of modules, each once: of two that lie one inside the other the inner comes first."""
    wanted = {id(module) for modules in chosen for module in modules}
    return list({id(module): module for module in _inner_first(model) if id(module) in wanted}.values())


def _named(model: PreTrainedModel, wrap: tuple[str, ...]) -> list[torch.nn.Module]:
    """Return the modules that the user chose, but for an adapter's own, which go with what holds them.

    They are small, and peft looks at their dtype from outside, where FSDP1 would not show the one they compute in.
    """
    adapters = {id(module) for path, module in model.named_modules() if is_adapter_weight(f"{path}.")}
    found = [module for module in _of_classes(model, set(wrap)) if id(module) not in adapters]
    present = {type(module).__name__ for module in model.modules()}
    for name in wrap:
        if name not in present:
            raise ConfigError(
                f"engine.wrap={list(wrap)}: {type(model).__name__} has no module of class {name!r}; it has "
                f"{_classes(model, name)}"
            )
    for module in found:
        if type(module).forward is torch.nn.Module.forward or isinstance(module, torch.nn.ModuleList):
            raise ConfigError(
                f"engine.wrap={list(wrap)}: a {type(module).__name__} is never called, so it cannot be gathered when "
                "it is; name the class of what it holds"
            )
    tied = tied_outside(model, found)
    if tied:
        path, key = min(tied.items())
        kind = next(type(module).__name__ for module in found if id(module) == key)
        raise ConfigError(
            f"engine.wrap={list(wrap)}: {path}, a {kind}, shares a weight with a module outside of it, and sharded "
            f"alone they would each have their own; leave {kind!r} out, or name a class that holds both"
        )
    return found


def layer_lists(model: PreTrainedModel) -> list[tuple[torch.nn.Module, str, torch.nn.ModuleList]]:
    """Return the lists of as many modules as the model has layers: who holds each, by which name, and the list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]


def _no_split_modules(model: PreTrainedModel) -> set[str]:
    """Return transformers' own list, which is a list, a set, a string or None, depending on model and release."""
    names = cast("Any", model)._no_split_modules or ()  # noqa: SLF001 - transformers' own convention
    return {names} if isinstance(names, str) else set(names)


def _of_classes(model: torch.nn.Module, names: set[str]) -> list[torch.nn.Module]:
    inner_first: dict[int, torch.nn.Module] = {}
    for module in _inner_first(model):
        inner_first.setdefault(id(module), module)
    return [module for module in inner_first.values() if type(module).__name__ in names and module is not model]


def _inner_first(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def tied_outside(model: torch.nn.Module, found: list[torch.nn.Module]) -> dict[str, int]:
    """Return path and id of the modules that share a parameter with one outside of them."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():  # noqa: SLF001 - named_parameters() hides shared ones
            holders.setdefault(id(parameter), set()).add(id(module))
    holders.pop(id(None), None)
    paths = {id(module): path for path, module in model.named_modules()}
    tied = {}
    for module in found:
        inside = {id(inner) for inner in module.modules()}
        if any(len(places) > 1 and places & inside and not places <= inside for places in holders.values()):
            tied[paths[id(module)]] = id(module)
    return tied


def _classes(model: torch.nn.Module, name: str) -> str:
    """List the classes of the model's modules, those whose names are like one first."""
    classes = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    close = difflib.get_close_matches(name, classes, n=3, cutoff=0.5)
    ordered = close + [entry for entry in classes if entry not in close]
    return ", ".join(ordered[:_NUM_NAMED])


def outermost(found: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that lie inside no other of them, in the order given."""
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]
