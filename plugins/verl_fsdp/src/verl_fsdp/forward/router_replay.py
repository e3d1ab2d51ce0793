"""Tokens through given experts, whatever kind of mixture the model is.

Each of transformers' routers scores all experts and takes the best by torch's ``topk``. So, while a layer with experts
runs, that one call is answered with the given experts and the router's scores of them. What it makes of the scores, and
their gradient, stay the model's own. It is right in a recomputation too, which runs the layer anew: a micro-batch's
backward comes before the next one's forward.

Shape legend: T tokens of a micro-batch, t those that go into this rank's model, row by row, with filling; k experts a
token.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import ModelError
from verl_engine.engine.routed_experts import choose, experts_of, given_experts, put_back
from verl_fsdp.forward.model_run import ModelRun


class RouterReplay:
    """The layers with experts of one model, in its order."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take hold of the layers of a model that is not sharded yet; ModelError where it has none."""
        self.layers = [
            _Layer(module, path, _num_experts(module.experts), type(model).__name__)
            for path, module in model.named_modules()
            if isinstance(module._modules.get("experts"), torch.nn.Module)  # noqa: SLF001 - a plain attribute is no part
        ]
        if not self.layers:
            raise ModelError(
                f"engine.router_replay=true: {type(model).__name__} has no layer with experts; set it to false"
            )

    def expect(self, batch: PackedBatch, source: torch.Tensor) -> None:
        """Say through which experts the tokens of the next forward go; BatchError where they do not fit the model.

        Args:
            batch: the micro-batch.
            source: [t] int64: what goes into the model, as indices among the T; -1 for filling.
        """
        experts = given_experts(batch, len(self.layers), self.layers[0].num_experts)
        rows = None if experts is None else experts_of(experts, source)
        for index, layer in enumerate(self.layers):
            layer.given, layer.found = None if rows is None else rows[:, index], None

    def found(self, source: torch.Tensor, num_tokens: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return [T, layers, k] int32: the experts of the last forward, without gradient; for `source` see `expect`.

        Collectives: an all-reduce over the group of ranks that split the tokens.
        """
        rows = torch.stack([layer.taken() for layer in self.layers], dim=1)
        whole = put_back(rows.int(), source, num_tokens)
        if group is not None:
            dist.all_reduce(whole, group=group)
        return whole

    def try_out(self, forward: Callable[[], torch.Tensor], shift: int | None) -> torch.Tensor:
        """Run a forward, of all layers or some, through experts so much further than the last time; None for any.

        Raises ModelError where experts are chosen elsewhere too.
        """
        for layer in self.layers:
            layer.given, layer.found = layer.found, None
            if layer.given is not None:
                layer.given = None if shift is None else (layer.given + shift) % layer.num_experts
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


def sources(
    lay_out: Callable[[PackedBatch], ModelRun], batch: PackedBatch, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return [t] int64: the index among the T of each token that goes into the model; -1 for filling.

    `lay_out` makes the run of a micro-batch, and fills up with token 0; the group's ranks split its tokens.
    """
    numbers = torch.arange(1, batch.num_tokens + 1, device=batch.input_ids.device)
    run = lay_out(dataclasses.replace(batch, input_ids=numbers))
    own = run.inputs["input_ids"]
    if run.num_columns not in (None, own.shape[1]):  # the model's forward takes its part itself
        own = own.split(run.num_columns, dim=1)[dist.get_rank(group)]
    return cast("torch.Tensor", own.flatten() - 1)


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
