"""Keeps a rank's part of a pipeline going after an exception, so that no other stage waits for it forever.

A stage sends activations on and gradients back. Where an exception left Megatron's schedule in the middle, its
neighbours would wait for what never comes. So each stage's forward and backward run behind a boundary in the autograd
graph: what goes wrong on one side is noted, and zeros go to the other. When the schedule is through, all ranks of the
pipeline tell each other, and raise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward


@dataclass(slots=True)
class Guard:
    """What went wrong on this rank, first of all."""

    failure: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep the first."""
        self.failure = self.failure or error

    def take(self) -> Exception | None:
        """Return what went wrong, and forget it: a traceback holds the graph, and the graph this guard, forever."""
        failure, self.failure = self.failure, None
        return failure

    def run(
        self,
        compute: Callable[[torch.Tensor | None], torch.Tensor],
        given: torch.Tensor | None,
        fake: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Call ``compute(given)`` such that no exception comes out of it, nor of its backward.

        Args:
            compute: one stage's forward.
            given: what the stage before sent, a leaf that wants its gradient; None in the first stage.
            fake: makes what to return where there is nothing, of the right shape and dtype.
        Returns:
            What `compute` gives; its backward fills ``given.grad``, with zeros if it fails.
        """
        own = None if given is None else given.detach().requires_grad_(torch.is_grad_enabled())
        inner: torch.Tensor | None = None
        try:
            inner = compute(own)
        except Exception as error:  # noqa: BLE001 - it is raised when all stages are through
            self.note(error)
        anchor = torch.zeros((), requires_grad=True) if given is None else given
        stage = _Stage(self, inner, own)
        output: torch.Tensor = _Boundary.apply(anchor, stage, fake)  # type: ignore[no-untyped-call]
        return output


@dataclass(slots=True)
class _Stage:
    """One forward of a stage, until its backward."""

    guard: Guard
    inner: torch.Tensor | None
    own: torch.Tensor | None

    def output(self, fake: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the forward's output as a tensor of its own; Megatron frees its memory once it is sent."""
        if self.inner is None:
            return fake()
        with torch.no_grad():
            output: torch.Tensor = self.inner.new_empty(0).set_(self.inner)  # type: ignore[call-overload] # torch takes a tensor too
            if output.numel() > 1:  # a loss may be somebody else's too
                self.inner.data = self.inner.new_empty(1)  # only its graph is needed: the memory is the other's alone
        return output

    def backward(self, gradient: torch.Tensor) -> None:
        """Run the forward's graph backward."""
        inner, self.inner = self.inner, None
        if inner is None or not inner.requires_grad:
            return
        try:
            custom_backward(inner, gradient)
        except Exception as error:  # noqa: BLE001 - it is raised when all stages are through
            self.guard.note(error)


class _Boundary(torch.autograd.Function):
    """Hands a stage's output on, and starts its backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stage: _Stage, fake: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.stage, ctx.shape = stage, anchor.shape
        return stage.output(fake)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage: _Stage = ctx.stage
        stage.backward(gradients[0])
        found = None if stage.own is None else stage.own.grad
        return gradients[0].new_zeros(ctx.shape) if found is None else found, None, None
