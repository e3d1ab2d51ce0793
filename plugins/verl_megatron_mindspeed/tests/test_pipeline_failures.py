"""Whatever goes wrong on one stage of a pipeline, every stage raises, none waits, and the next step is right."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plugins.verl_megatron_mindspeed.tests.engines import engine_of, forget_groups, new_driver
from plugins.verl_megatron_mindspeed.tests.model_families import write_family
from verl_engine.contract.errors import EngineError
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.conformance.driver import Driver
    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist

VPP = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2": {"pipeline_parallel_size": 2},
    "VPP2, overlap": {**VPP, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


class BoomError(RuntimeError):
    """Stands for whatever may go wrong."""


class UnportableError(RuntimeError):
    """Cannot be pickled back: its arguments are not what it was made with."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of four layers: first and last stage exchange gradients."""
    return write_family(tmp_path_factory.mktemp("model") / "four", "qwen3, tied", num_hidden_layers=4)


class FailingLoss:
    """Raises in the second micro-batch, and does not keep what it raised."""

    def __init__(self, error: Exception) -> None:
        self.errors = [error]
        self.count = 0

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.count += 1
        if self.count == 2:
            raise self.errors.pop()
        return weighted_loss(output, batch)


class _FailingBackward(torch.autograd.Function):
    """Does nothing, and raises in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        del ctx
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        del ctx, gradients
        raise BoomError("in the backward")


def fail_in_loss(driver: Driver, rank: int) -> None:
    """Raise in the loss of the last stage."""
    del rank
    driver.step(driver.micro_batches(make_sequences(8), 3), FailingLoss(BoomError("in the loss")))


def fail_unportably(driver: Driver, rank: int) -> None:
    """Raise there what cannot travel."""
    del rank
    driver.step(driver.micro_batches(make_sequences(8), 3), FailingLoss(UnportableError("in the", "loss")))


def _failing_layer(driver: Driver, stage: int, rank: int, hook: Callable[..., Any]) -> Any:
    """Let a layer of one stage do what a hook does with its output."""
    if rank != stage:
        return None
    return engine_of(driver).model.parts()[-1].decoder.layers[0].mlp.register_forward_hook(hook)


def _raise(*_: Any) -> None:
    raise BoomError("in the forward")


def _raise_in_backward(_layer: torch.nn.Module, _arguments: Any, output: tuple[torch.Tensor, Any]) -> Any:
    return _FailingBackward.apply(output[0]), output[1]  # type: ignore[no-untyped-call]


def _fail_with_layer(driver: Driver, stage: int, rank: int, hook: Callable[..., Any], *, trains: bool) -> None:
    handle = _failing_layer(driver, stage, rank, hook)
    try:
        if trains:
            driver.step(driver.micro_batches(make_sequences(8), 3))
        else:
            driver.infer(make_sequences(4))
    finally:
        if handle is not None:
            handle.remove()


def fail_in_first_forward(driver: Driver, rank: int) -> None:
    """Raise in a layer of the first stage."""
    _fail_with_layer(driver, 0, rank, _raise, trains=True)


def fail_in_inference(driver: Driver, rank: int) -> None:
    """Raise in a layer of the last stage, without gradient."""
    _fail_with_layer(driver, 1, rank, _raise, trains=False)


def fail_in_last_backward(driver: Driver, rank: int) -> None:
    """Raise in the backward of a layer of the last stage."""
    _fail_with_layer(driver, 1, rank, _raise_in_backward, trains=True)


def fail_in_first_backward(driver: Driver, rank: int) -> None:
    """Raise in the backward of a layer of the first stage."""
    _fail_with_layer(driver, 0, rank, _raise_in_backward, trains=True)


FAILURES = (
    fail_in_loss,
    fail_in_first_forward,
    fail_in_inference,
    fail_in_last_backward,
    fail_in_first_backward,
)


def message_of(fail: Callable[[Driver, int], None], driver: Driver, rank: int) -> str:
    """Return what was raised; nobody keeps it."""
    with pytest.raises(BoomError) as caught:
        fail(driver, rank)
    return str(caught.value)


def run_failures(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[str], list[float], list[float]]:
    """Let one engine fail in all ways, another in none; return what was raised, and the steps after it."""
    driver = new_driver(folder, rank, **settings)
    raised = [message_of(fail, driver, rank) for fail in FAILURES]
    after = [driver.train(make_sequences(8, seed=step)).optimizer.grad_norm for step in range(2)]
    weights = [weakref.ref(weight) for chunk in engine_of(driver).model.chunks for weight in chunk.parameters()]
    del driver
    forget_groups()  # Megatron's cache of rotary embeddings holds a module that was hooked
    gc.collect()  # of tracebacks; they held the graph, and it held the model, through which it cannot see
    gc.collect()
    assert not any(weight() is not None for weight in weights), "an engine that failed is gone, its weights are not"
    plain = new_driver(folder, rank, **settings)
    return raised, after, [plain.train(make_sequences(8, seed=step)).optimizer.grad_norm for step in range(2)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_stages_raise_and_the_next_steps_are_right(ranks: RankPool, folder: Path, name: str) -> None:
    for raised, after, right in ranks.run(run_failures, folder, LAYOUTS[name], timeout_s=60.0):
        assert raised == ["in the loss", "in the forward", "in the forward", "in the backward", "in the backward"]
        assert after == pytest.approx(right, abs=1e-6)


def raise_unportable(rank: int, folder: Path) -> None:
    """The stage that fails raises its own; others, to which it cannot travel, one that describes it."""
    driver = new_driver(folder, rank, pipeline_parallel_size=2)
    with pytest.raises(UnportableError if rank == 1 else EngineError, match="in the loss") as caught:
        fail_unportably(driver, rank)
    if rank == 0:
        assert str(caught.value) == "pipeline stage 1 failed with UnportableError: in the loss"


def test_an_error_that_cannot_be_pickled_is_described(ranks: RankPool, folder: Path) -> None:
    ranks.run(raise_unportable, folder, timeout_s=60.0)
