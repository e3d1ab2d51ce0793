"""Which experts tokens go through: given with the sequences, or said of a forward.

Each of transformers' routers scores all experts and takes the best by torch's ``topk``. So, while a layer with experts
runs, that one call is noted, or answered with the given experts and the router's scores of them. What it makes of the
scores, and their gradient, stay the model's own. It is right in a recomputation too, which runs the layer anew: a
micro-batch's backward comes before the next one's forward.

Source: Ma et al. 2025, "Stabilizing MoE reinforcement learning by aligning training and inference routers" (rollout
routing replay).

Shape legend: T tokens of a micro-batch, t those that a rank runs, with filling; layers with experts; k experts a token.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import BatchError, ModelError

FIELD: Final = "routed_experts"
"""The field of a sequence; see `Sequence`."""


def given_experts(batch: PackedBatch, num_layers: int, num_experts: int) -> torch.Tensor | None:
    """Return [T, layers, k] int64, -1 where the router chooses; None where the sequences bring none.

    Args:
        batch: the micro-batch.
        num_layers: of the model that have experts.
        num_experts: of a layer.
    Raises:
        BatchError: what the sequences bring fits no such model. To see it, the host waits for the device once.
    """
    found = batch.fields.get(FIELD)
    if found is None:
        return None
    if found.ndim != 3 or found.shape[1] != num_layers or found.is_floating_point():  # noqa: PLR2004
        raise BatchError(
            f"{FIELD} is {found.dtype} of {list(found.shape[1:])} per token; it must be whole numbers of [layers with "
            f"experts, experts per token], and the model has {num_layers} such layers"
        )
    ordered = found.long().sort(-1).values
    is_own, is_twice = ordered[..., -1] == -1, (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    is_right = is_own & (ordered[..., 0] == -1) | (ordered[..., 0] >= 0) & (ordered[..., -1] < num_experts) & ~is_twice
    if not bool(is_right.all()):
        raise BatchError(
            f"{FIELD} must name different experts for each token and layer, from 0 to {num_experts - 1}, or be -1 "
            "throughout where the router is to choose"
        )
    return found.long()


def experts_of(experts: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Pick the tokens that a rank runs, [t, layers, k], from [T, layers, k]; the router chooses for filling.

    `source`, [t] int64, has their indices among the T, -1 for filling.
    """
    return experts[source.clamp_min(0)].masked_fill((source < 0)[:, None, None], -1)


def put_back(experts: torch.Tensor, source: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Undo `experts_of`: return [T, layers, k], 0 for tokens that this rank does not run."""
    whole = experts.new_zeros(num_tokens + 1, *experts.shape[1:])
    return whole.index_put((source.where(source >= 0, num_tokens),), experts)[:num_tokens]


def choose(scores: torch.Tensor, own: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace what a router chose in one layer; a BatchError where the numbers of experts or tokens differ.

    Args:
        scores: [t, experts]: what it chose by.
        own: [t, k] int64: its choice.
        given: [t, k] int64; -1 where its choice stays.
    Returns:
        The scores of the experts, with gradient, and the experts, both [t, k].
    """
    if given.shape != own.shape:
        raise BatchError(
            f"{FIELD} has {given.shape[1]} experts for each of {given.shape[0]} tokens, and the model's routers choose "
            f"{own.shape[1]} for each of {own.shape[0]}"
        )
    experts = torch.where(given < 0, own, given)
    return scores.gather(1, experts), experts


class ExpertLayers:
    """The layers with experts of one model, in its order."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take hold of the layers of a model that is not sharded yet; ModelError where it has none."""
        self._model = type(model).__name__
        self.layers = [
            _Layer(module, path, _num_experts(module.experts), self._model)
            for path, module in model.named_modules()
            if isinstance(module._modules.get("experts"), torch.nn.Module)  # noqa: SLF001 - a plain attribute is no part
        ]
        if not self.layers:
            raise ModelError(f"engine.router_replay=true: {self._model} has no layer with experts; set it to false")

    def chosen(self) -> torch.Tensor:
        """Return [t, layers, k] int64: the experts of the last forward, which was one without gradient."""
        return torch.stack([layer.taken() for layer in self.layers], dim=1)

    def require_followed(self, forward: Callable[[], torch.Tensor]) -> None:
        """Check by forwards, of all layers or some: their own experts change nothing, others do; else a ModelError."""
        first, again, other = (self._through(forward, shift) for shift in (None, 0, 1))
        # On an accelerator no two forwards need be equal.
        if not 10 * (first - again).abs().max() < (first - other).abs().max():
            raise ModelError(f"engine.router_replay=true: {self._model} does not follow given experts; set it to false")

    def _through(self, forward: Callable[[], torch.Tensor], shift: int | None) -> torch.Tensor:
        """Run a forward through experts so much further than the last time; None for any."""
        for layer in self.layers:
            last, layer.found = layer.found, None
            layer.given = None if last is None or shift is None else (last + shift) % layer.num_experts
        with _Choice(self.layers[0].num_experts, None) as choice:
            output = forward()
        num_ran = sum(layer.found is not None for layer in self.layers)
        if len(choice.made) != num_ran:
            raise ModelError(
                f"engine.router_replay=true: the model chooses experts {len(choice.made)} times in a forward, and "
                f"{num_ran} of its layers have a part named experts, so it cannot be given others; set it to false"
            )
        return output

    def release(self) -> None:
        """Leave the model as it was."""
        for layer in self.layers:
            layer.release()


class _Layer:
    """A layer with experts, and those that tokens are to go through or went."""

    def __init__(self, module: torch.nn.Module, path: str, num_experts: int, model: str) -> None:
        self.num_experts = num_experts
        self.given: torch.Tensor | None = None
        self.found: torch.Tensor | None = None
        self._name = f"{path} of {model}"
        self._module = module
        self._plain = module.forward
        module.forward = self._forward

    def release(self) -> None:
        """Let the layer run as it did."""
        self._module.forward = self._plain

    def taken(self) -> torch.Tensor:
        """Return [t, k]: what was found."""
        if self.found is None:
            raise ModelError(f"engine.router_replay=true: {self._name} did not run; set it to false")
        return self.found

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is None and torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        with _Choice(self.num_experts, self.given) as choice:
            output = self._plain(*args, **kwargs)
        if len(choice.made) != 1:
            raise ModelError(
                f"engine.router_replay=true: {self._name} chooses its experts otherwise than by one topk of the scores "
                "of all of them, so it cannot be given others; set it to false"
            )
        self.found = None if torch.is_grad_enabled() else choice.made[0]
        return output


class _Choice(TorchFunctionMode):
    """Replaces inside what ``topk`` chooses among all experts, [t, experts]."""

    def __init__(self, num_experts: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._given = given
        self.made: list[torch.Tensor] = []
        """[t, k] of each call."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and answer in its place where it is the router's choice."""
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or args[0].shape[1:] != (self._num_experts,):
            return found
        if self._given is not None:
            found = torch.return_types.topk(choose(args[0], found[1], self._given))
        self.made.append(found[1])
        return found


def _num_experts(experts: Any) -> int:
    """Return how many experts a layer has; 0 where it does not say, which is found out when it runs."""
    return len(experts) if isinstance(experts, torch.nn.ModuleList) else getattr(experts, "num_experts", 0)
