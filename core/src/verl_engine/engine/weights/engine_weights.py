"""How an engine over one torch module reaches its weights and its optimizer's state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from verl_engine.engine.base import WeightShard
from verl_engine.engine.checkpoints.module import load_module_state, module_state
from verl_engine.engine.offload import apply_to_module
from verl_engine.engine.weights import module_weights
from verl_engine.engine.weights.module_weights import Exported


class EngineWeights:
    """Plain tensors and DTensors of one module; derived from where a wrapper keeps them otherwise.

    `exported` says what there is, by the names of the module before it was wrapped. The other methods take such a dict,
    maybe with other names and with adapters; see `verl_engine.engine.weights.module_weights` for what they do.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Take what is called in a forward, wrapped already if it is to be."""
        self.module = self.plain = module
        """The latter has transformers' ``config`` and ``save_pretrained``."""
        # Between a forward and a backward a sharded module holds gathered parameters; these are the shards, always.
        self.parameters = dict(module.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all buffers, live."""
        return self.module.named_buffers()

    def exported(self) -> dict[str, Exported]:
        """Say what a Hugging Face folder holds."""
        return module_weights.exported_tensors(self.module, self.parameters)

    def full(self, exported: Mapping[str, Exported], names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather full weights."""
        return module_weights.full_weights(exported, names)

    def load_full(self, exported: Mapping[str, Exported], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full weights into the shards."""
        module_weights.load_full_weights(exported, weights)

    def shards(self, exported: Mapping[str, Exported]) -> Iterator[WeightShard]:
        """Yield this rank's shards."""
        return module_weights.weight_shards(exported)

    def load_shards(self, exported: Mapping[str, Exported], shards: Iterable[WeightShard]) -> None:
        """Copy this rank's shards in."""
        module_weights.load_weight_shards(exported, shards)

    def state(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return the state of weights, buffers and optimizer; see `Engine.state_dict`."""
        return module_state(self.module, optimizer)

    def load_state(self, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
        """Take such a state."""
        load_module_state(self.module, optimizer, state)

    def apply(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put a copy of each tensor in its place, on another device maybe."""
        apply_to_module(self.module, copy)
