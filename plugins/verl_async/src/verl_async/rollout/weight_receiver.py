"""Takes new weights into a model in place, and knows which have come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_MAX_NAMED: Final = 8
"""Names in an error message; the rest is counted."""


class WeightReceiver:
    """Fills the parameters and persistent buffers of a model: what its state dict, and its Hugging Face folder, hold.

    Tied weights are one tensor under several names: any of the names fills it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._loaded: set[int] = set()

    @property
    def is_loading(self) -> bool:
        """Whether weights were loaded that no commit has put in force."""
        return bool(self._loaded)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors into the model, cast to its dtype and moved to its device.

        Args:
            weights: Names as in the Hugging Face folder, full tensors of the model's shapes and any float dtype. They
                are read as they come, so those before a wrong one are in place when it raises.
        Raises:
            WeightsError: a name or shape that the model does not have.
        """
        for name, weight in weights:
            target = self._targets.get(name)
            if target is None:
                raise WeightsError(
                    f"weight {name!r} is not in the rollout model, which has {_listed(self._targets)}; "
                    "trainer and rollout must load the same model folder"
                )
            if target.shape != weight.shape:
                raise WeightsError(
                    f"weight {name!r} has shape {tuple(weight.shape)}, the rollout model wants {tuple(target.shape)}; "
                    "send full tensors, not shards, of the same model"
                )
            target.copy_(weight)
            self._loaded.add(id(target))

    def commit(self) -> None:
        """Check that every weight has come since the last commit; those that came stay noted when it raises.

        Raises:
            WeightsError: weights are missing.
        """
        first_names = {id(target): name for name, target in reversed(self._targets.items())}
        missing = sorted(name for target, name in first_names.items() if target not in self._loaded)
        if missing:
            raise WeightsError(
                f"{len(missing)} weights were not loaded since the last commit: {_listed(missing)}; "
                "load all weights of the model, then commit"
            )
        self._loaded.clear()


def _listed(names: Iterable[str]) -> str:
    """Name the first few, and count the rest."""
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
