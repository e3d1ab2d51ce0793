"""Weights of a module that has names of its own, under those of a Hugging Face folder."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.module_weights import Exported, exported_tensors


class RenamedWeights(EngineWeights):
    """Of a module that is not one of transformers: the same tensors, one by one, under other names."""

    def __init__(self, module: torch.nn.Module, name_of: Callable[[str], str]) -> None:
        """Take the module, sharded already if it is to be.

        Args:
            module: its parameters are plain tensors or DTensors.
            name_of: gives the Hugging Face name of each parameter and buffer; two that differ get two that differ.
        """
        super().__init__(module)
        self._name_of = name_of
        self.parameters = {name_of(name): parameter for name, parameter in self.parameters.items()}

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all buffers, live."""
        return ((self._name_of(name), buffer) for name, buffer in self.module.named_buffers())

    def exported(self) -> dict[str, Exported]:
        """Say what a Hugging Face folder holds."""
        own = dict(self.module.named_parameters())
        return {self._name_of(name): entry for name, entry in exported_tensors(self.module, own).items()}

    def state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the state of weights, buffers and optimizer; see `Engine.state_dict`."""
        return _renamed(super().state(optimizer), self._name_of)

    def load_state(self, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
        """Take such a state."""
        tensors = (*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers())
        own = {self._name_of(name): name for name, _ in tensors}
        super().load_state(optimizer, _renamed(state, own.__getitem__))


def _renamed(state: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    renamed = {
        key: {name_of(name): tensor for name, tensor in state[key].items()}
        for key in ("model", "buffers")
        if key in state
    }
    if "optimizer" in state:
        moments, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
        renamed["optimizer"] = {
            **state["optimizer"],
            "state": {name_of(name): values for name, values in moments.items()},
            "param_groups": [{**group, "params": [name_of(name) for name in group["params"]]} for group in groups],
        }
    return {**state, **renamed}
