"""Tokens through given experts, in Megatron's routers.

Shape legend: T tokens of a micro-batch, t those of this context-parallel rank, n those that this rank holds outside
attention (a part of t with sequence parallelism); k experts a token.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.engine.routed_experts import choose, experts_of, given_experts, put_back
from verl_megatron_mindspeed.forward.layout import Layout
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel


class RouterReplay:
    """The routers of this rank's layers."""

    def __init__(self, model: MegatronModel, parallel: Parallel) -> None:
        """Take hold of them.

        Raises:
            ModelError: the model has no experts.
            ConfigError: this release of Megatron does not let its routers be given experts.
        """
        self._transformer = model.transformer
        self._parallel = parallel
        if model.transformer.num_moe_experts is None:
            raise ModelError(
                f"engine.router_replay=true: the model in {model.folder} has no layer with experts; set it to false"
            )
        layers = [layer for part in model.parts() for layer in part.decoder.layers]
        self._routers = {layer.layer_number - 1: _Router(layer.mlp.router) for layer in layers}
        self._layout: Layout | None = None

    def begin(self, *, is_training: bool) -> None:
        """Forget an unfinished pass."""
        for router in self._routers.values():
            router.is_training = is_training
            router.recomputed.clear()

    def expect(self, layout: Layout) -> None:
        """Say through which experts the tokens of the next forward go; BatchError where they do not fit the model."""
        experts = given_experts(layout.batch, self._transformer.num_layers, self._transformer.num_moe_experts)
        rows = None if experts is None else experts_of(experts, self._own(layout))
        for index, router in self._routers.items():
            router.given = None if rows is None else rows[:, index]
            router.is_filling, router.was_asked = layout.is_filling, False
        if not layout.is_filling:
            self._layout = layout

    def check(self) -> None:
        """Raise ModelError where no router was asked in the forward that has just run."""
        if not any(router.was_asked for router in self._routers.values()):
            raise ModelError(
                "engine.router_replay=true: something else than Megatron's own router chooses experts, and cannot be "
                "given others; set it to false"
            )

    def found(self) -> torch.Tensor:
        """Return [T, layers, k] int32 on every rank: the experts of the last micro-batch, run without gradient.

        Collectives: an all-reduce over each group of ranks that split tokens or layers.
        """
        layout = self._layout
        assert layout is not None
        shape = (layout.batch.num_tokens, self._transformer.num_layers, self._transformer.moe_router_topk)
        whole = torch.zeros(shape, dtype=torch.int32, device=layout.source.device)
        for index, router in self._routers.items():
            assert router.found is not None
            whole[:, index] = put_back(router.found.int(), self._own(layout), layout.batch.num_tokens)
        parallel = self._parallel
        splitting = [parallel.context, parallel.pipeline] + [parallel.tensor] * self._transformer.sequence_parallel
        for group in splitting:
            if group.size > 1:
                dist.all_reduce(whole, group=group.group)
        return whole

    def _own(self, layout: Layout) -> torch.Tensor:
        """Return [n] int64: what this rank's routers see, as indices among the T; -1 for filling."""
        tensor = self._parallel.tensor
        return layout.source.chunk(tensor.size)[tensor.rank] if self._transformer.sequence_parallel else layout.source


class _Router:
    """What a router of Megatron's asks for experts."""

    def __init__(self, router: Any) -> None:
        if not hasattr(router, "router_replay"):
            raise ConfigError(
                "engine.router_replay=true: routers of this release of Megatron cannot be given experts; install "
                "megatron-core 0.16.1 or later, or set it to false"
            )
        router.router_replay = self
        self.given: torch.Tensor | None = None
        """[n, k] for the next forward."""
        self.found: torch.Tensor | None = None
        """[n, k] of the last forward without gradient."""
        self.is_filling = self.is_training = self.was_asked = False
        self.recomputed: deque[torch.Tensor | None] = deque()
        """What was given to the micro-batches that will be recomputed: in their order, as all schedules go backward."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose [n, k] of [n, experts]; name and arguments are Megatron's."""
        assert default_compute_topk is not None
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.given
        if self.is_training and not torch.is_grad_enabled():  # it will be recomputed
            self.recomputed.append(given)
        elif self.recomputed:
            given = self.recomputed.popleft()
        if given is not None:
            values, experts = choose(scores, experts, given)
        if not self.is_filling:
            self.found = None if self.is_training else experts
        self.was_asked = True
        return values, experts
