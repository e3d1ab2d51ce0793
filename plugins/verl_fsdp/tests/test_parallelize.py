"""Every way of sharding gives the gradient of one process: copies, prefetch, offload, checkpointing, compiling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import torch
import transformers

from verl_engine.contract.errors import ConfigError, UnsupportedError
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import (
    accumulate,
    load_reference,
    make_sequences,
    reference_gradient,
    relative_error,
    weighted_loss,
)
from verl_engine.testing.tiny_models import tiny_config
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model import block_settings

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

TOLERANCE: Final = 1e-5  # the contract's; rounding alone makes 2e-6 on some processors
NUM_SEQUENCES: Final = 12


@pytest.fixture(params=[1, 2], ids=["one_rank", "two_ranks"])
def ranks(request: pytest.FixtureRequest, rank_pools: RankPools) -> RankPool:
    """Processes that stay."""
    return rank_pools.get(request.param)


@pytest.fixture
def four_ranks(rank_pools: RankPools) -> RankPool:
    """As many as two copies of two shards take."""
    return rank_pools.get(4)


def build(rank: int, folder: Path, world_size: int, **settings: Any) -> tuple[Driver, ShardedEngine]:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **settings}
    driver = Driver(section, folder, rank, world_size)
    return driver, cast("ShardedEngine", driver.engine)


def full_gradients(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    return {
        name.replace("base_layer.", ""): cast("Any", parameter.grad).full_tensor()
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


def gradient_on_rank(rank: int, folder: Path, world_size: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the whole gradient of a global batch in two micro-batches, that an engine gives in its second step.

    Before it are a step, whose gradient is thrown away, and an inference: both leave blocks gathered or not.
    """
    driver, engine = build(rank, folder, world_size, **settings)
    found: list[dict[str, torch.Tensor]] = []
    engine.optimizer.step = lambda: found.append(full_gradients(engine))  # type: ignore[method-assign, assignment]
    driver.train(make_sequences(NUM_SEQUENCES, seed=5))
    driver.infer(make_sequences(3))
    driver.step(driver.micro_batches(make_sequences(NUM_SEQUENCES)), weighted_loss)
    return found[-1]


def require_gradient(pool: RankPool, folder: Path, settings: dict[str, Any]) -> None:
    expected = reference_gradient(folder, make_sequences(NUM_SEQUENCES))
    for found in pool.run(gradient_on_rank, folder, pool.world_size, settings):
        assert found.keys() == expected.keys()
        assert relative_error(found, expected) <= TOLERANCE


WAYS: Final[dict[str, dict[str, Any]]] = {
    "not_resharded": {"reshard_after_forward": False},
    "forward_prefetch": {"forward_prefetch": 1},
    "backward_prefetch": {"backward_prefetch": 2},
    "both_prefetches_further_than_the_model": {"forward_prefetch": 5, "backward_prefetch": 5},
    "activation_checkpointing": {"activation_checkpointing": True},
    "activation_checkpointing_padded": {"activation_checkpointing": True, "packing": False},
    "cpu_offload": {"cpu_offload": True},
    "wrapped_by_name": {"wrap": ("Qwen3MLP", "Qwen3Attention")},
    "wrapped_one_in_the_other": {"wrap": ("Qwen3DecoderLayer", "Qwen3MLP"), "forward_prefetch": 1},
    "embedding_and_output_wrapped": {"wrap": ("Embedding", "Qwen3DecoderLayer", "Linear")},
}


@pytest.mark.thinned(one_in=2)
@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_gradient_is_that_of_one_process(model_folder: Path, ranks: RankPool, way: str) -> None:
    require_gradient(ranks, model_folder, WAYS[way])


def compiled_on_rank(rank: int, folder: Path, world_size: int) -> list[int]:
    """Compare with the gradient of one process; return how many graphs there are after each of five steps.

    With activation checkpointing, which runs each graph twice.
    """
    from torch._dynamo.utils import counters

    driver, engine = build(
        rank, folder, world_size, compile=True, compile_backend="aot_eager", activation_checkpointing=True
    )
    assert not [name for name in engine.parameters if "_orig_mod" in name]
    assert not [spec.name for spec in engine.weight_specs() if "_orig_mod" in spec.name]
    found: list[dict[str, torch.Tensor]] = []
    engine.optimizer.step = lambda: found.append(full_gradients(engine))  # type: ignore[method-assign, assignment]
    graphs = []
    for seed in range(5):
        driver.train(make_sequences(NUM_SEQUENCES, seed=seed))
        graphs.append(counters["stats"]["unique_graphs"])
    assert relative_error(found[0], reference_gradient(folder, make_sequences(NUM_SEQUENCES))) <= TOLERANCE
    return graphs


def compiled_log_probs(rank: int, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    drivers = (
        build(rank, folder, 1, forward_only=True, **way)[0]
        for way in ({}, {"compile": True, "compile_backend": "eager"})
    )
    plain, compiled_too = (driver.infer(make_sequences(3)) for driver in drivers)
    return plain, compiled_too


@pytest.mark.dist
def test_compiled_blocks_give_the_log_probs_of_plain_ones(model_folder: Path, rank_pools: RankPools) -> None:
    ranks = rank_pools.get(1)
    ((plain, found),) = ranks.run(compiled_log_probs, model_folder)
    ranks.close()  # in there, no other compiler can be used any more
    assert all(torch.equal(new, old) for new, old in zip(found, plain, strict=True))


@pytest.mark.nightly
@pytest.mark.dist
@pytest.mark.slow
def test_compiled_blocks_fit_every_micro_batch_and_give_the_gradient_of_one_process(
    model_folder: Path, ranks: RankPool
) -> None:
    for graphs in ranks.run(compiled_on_rank, model_folder, ranks.world_size, timeout_s=280.0):
        # Where sequences lie differs in each of ten micro-batches; torch would give up after graphs for eight.
        assert graphs[-1] == graphs[1]
    ranks.close()  # in there, no other compiler can be used any more


def test_a_backend_that_torch_compile_does_not_have_is_refused_and_forgotten() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.compile_backend=indctor is none .* use one of .*inductor"):
        block_settings.compile_block(torch.nn.Linear(2, 2), Fsdp2Config(compile=True, compile_backend="indctor"))
    assert "indctor" not in block_settings._backends_used


def test_two_backends_of_torch_compile_in_a_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_settings, "_backends_used", {"eager"})
    with pytest.raises(
        UnsupportedError, match=r"^engine\.compile_backend=inductor: .* with eager, .* use one for both$"
    ):
        block_settings.compile_block(torch.nn.Linear(2, 2), Fsdp2Config(compile=True))
    block_settings.compile_block(torch.nn.Linear(2, 2), Fsdp2Config(compile=True, compile_backend="eager"))


HYBRID: Final[dict[str, dict[str, Any]]] = {
    "two_copies_of_two_shards": {"shard_ranks": 2},
    "four_copies": {"shard_ranks": 1},
    "no_copies": {"shard_ranks": 4},
    "two_copies_unreduced_gradients_reduced_at_each": {"shard_ranks": 2, "gradient_sync": "every_micro_batch"},
    "resharded_to_two_ranks": {"reshard_after_forward": 2},
    "two_copies_offloaded": {"shard_ranks": 2, "cpu_offload": True},
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.nightly if index % 3 else []) for index, way in enumerate(HYBRID)]
)
def test_copies_on_four_ranks_give_the_gradient_of_one_process(
    model_folder: Path, four_ranks: RankPool, way: str
) -> None:
    require_gradient(four_ranks, model_folder, HYBRID[way])


def moe_folder(folder: Path) -> Path:
    """Write a Qwen3-MoE of two layers, with weights large enough that the router chooses clearly."""
    config = transformers.Qwen3MoeConfig(
        **tiny_config(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_mixture_of_experts_gets_the_gradient_of_one_process_its_router_too(
    tmp_path: Path, ranks: RankPool, packing: bool
) -> None:
    folder = moe_folder(tmp_path / "moe")
    reference = load_reference(folder)
    accumulate(reference, make_sequences(NUM_SEQUENCES))  # in float32: transformers' experts know no float64
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    routers = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(float(expected[name].abs().max()) > 1e-6 for name in routers)
    for found in ranks.run(gradient_on_rank, folder, ranks.world_size, {"packing": packing}):
        assert found.keys() == expected.keys()
        assert relative_error(found, expected) <= 1e-5


def dtypes_seen(rank: int, folder: Path, world_size: int, param_dtype: str) -> dict[str, torch.dtype]:
    """Return the dtype that a layer computes in, and those of what is kept, in training."""
    driver, engine = build(rank, folder, world_size, param_dtype=param_dtype)
    seen: dict[str, torch.dtype] = {}

    def look(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.update(weight=module.weight.dtype, input=inputs[0].dtype, output=output.dtype)

    cast("Any", engine.model).model.layers[1].mlp.up_proj.register_forward_hook(look)
    step = engine.optimizer.step

    def step_and_look() -> Any:
        seen.update(gradient=next(iter(full_gradients(engine).values())).dtype)
        return step()

    engine.optimizer.step = step_and_look  # type: ignore[method-assign, assignment]
    driver.train(make_sequences(NUM_SEQUENCES))
    kept = {parameter.dtype for parameter in engine.parameters.values()}
    moments = {entry["exp_avg"].dtype for entry in engine.optimizer.state.values()}
    assert kept == moments == {torch.float32}
    return seen


@pytest.mark.dist
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_blocks_compute_in_param_dtype_and_what_is_kept_and_reduced_is_float32(
    model_folder: Path, ranks: RankPool, param_dtype: str
) -> None:
    dtype = getattr(torch, param_dtype)
    expected = {"weight": dtype, "input": dtype, "output": dtype, "gradient": torch.float32}
    assert ranks.run(dtypes_seen, model_folder, ranks.world_size, param_dtype) == [expected] * ranks.world_size
