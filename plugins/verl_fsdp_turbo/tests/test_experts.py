"""Experts divided over two ranks. The release played here computes them in the dtype that it is told."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from plugins.verl_fsdp_turbo.tests.on_ranks import build, build_another, prepare, refusal, tidy
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.gradient_probe import PROBE_SETTINGS, GradientProbe
from verl_engine.testing.conformance.reference import furthest, load_reference, make_sequences, relative_error
from verl_engine.testing.conformance.router_replay import by_hand, with_experts
from verl_engine.testing.tiny_models import tiny_config, write_tiny_mixture

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

EXPERTS: Final[dict[str, Any]] = {
    "expert_parallel_size": 2,
    "ep_plan": {"apply_modules": ["model.layers.{*}.mlp.experts"]},
}


def prepare_newer() -> None:
    """Prepare a process in which the library has the newest release, and one thing more."""
    os.environ["FAKE_FSDP_TURBO_HAS"] = "reset_parallel_state,function_patches,data_mesh,expert_dtype"
    prepare()


@pytest.fixture
def newer(rank_pools: RankPools, library_folder: Path, only_fake: None) -> RankPool:  # noqa: ARG001 - it may skip
    assert library_folder.is_dir()
    return rank_pools.get(2, prepare=prepare_newer, tidy=tidy)


def write_experts(folder: Path, count: int) -> Path:
    """Write a Qwen3 with a mixture of experts."""
    config = transformers.Qwen3MoeConfig(
        **tiny_config(), num_experts=count, num_experts_per_tok=2, moe_intermediate_size=16
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


# Clipping bites, and eps keeps AdamW from hiding the scale of a gradient.
OPTIMIZER: Final[dict[str, Any]] = {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.05}


def two_steps(driver: Driver) -> tuple[list[float], dict[str, torch.Tensor]]:
    norms = [driver.train(make_sequences(6, seed=step)).optimizer.grad_norm for step in range(2)]
    return norms, driver.weights()


def divided_and_whole(rank: int, folder: Path, settings: dict[str, Any]) -> Any:
    whole = Driver({"backend": "fsdp2", "device": "cpu"} | OPTIMIZER, folder, rank, 2)
    return two_steps(build(rank, folder, **OPTIMIZER, **EXPERTS, **settings)), two_steps(whole)


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [{}, {"fully_shard_parallel_size": 1}, {"gradient_sync": "every_micro_batch"}],
    ids=["sharded", "copies", "reduced each time"],
)
def test_divided_experts_and_their_routers_train_as_whole_ones(
    tmp_path: Path, newer: RankPool, settings: dict[str, Any]
) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    for (norms, weights), (norms_whole, weights_whole) in newer.run(divided_and_whole, folder, settings):
        assert norms == pytest.approx(norms_whole, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, weights_whole[name], rtol=0, atol=1e-5, msg=name)


def reductions_after(rank: int, folder: Path) -> bool:
    """Build two engines; say whether torch's reductions are still torch's own."""
    names = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
    plain = [getattr(torch.distributed, name) for name in names]
    build(rank, folder, **EXPERTS)
    build_another(rank, folder, forward_only=True, **EXPERTS)
    return plain == [getattr(torch.distributed, name) for name in names]


@pytest.mark.fault(35)
@pytest.mark.dist
def test_engines_with_experts_leave_the_reductions_of_others_as_they_are(tmp_path: Path, newer: RankPool) -> None:
    assert all(newer.run(reductions_after, write_experts(tmp_path / "moe", 4)))


def divided_in_another_torch(rank: int, folder: Path, release: str) -> Any:
    """Let torch do with a divisor what some other release, or a device's plugin, does."""
    module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    plain = module.foreach_reduce

    def reduce(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(plain).bind(*args, **kwargs)
        if release == "sums and divides":
            bound.arguments["force_sum_reduction_for_comms"] = True
        elif bound.arguments["reduce_scatter_group"].size() == 1:
            bound.arguments["gradient_divide_factor"] = None
        return plain(*bound.args, **bound.kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "foreach_reduce", reduce)
        return divided_and_whole(rank, folder, {})


@pytest.mark.dist
@pytest.mark.parametrize("release", ["sums and divides", "leaves out the divisor of a group of one"])
def test_gradients_of_experts_are_right_whatever_torch_makes_of_a_divisor(
    tmp_path: Path, newer: RankPool, release: str
) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    for (norms, weights), (norms_whole, weights_whole) in newer.run(divided_in_another_torch, folder, release):
        assert norms == pytest.approx(norms_whole, rel=1e-4)
        assert furthest(weights, weights_whole)[1] < 1e-5


def clipped(rank: int, folder: Path) -> tuple[float, float, float]:
    """Return the norm that was reported, that of the whole gradient, and that after clipping."""
    driver = build(rank, folder, **OPTIMIZER, **EXPERTS)
    engine: Any = driver.engine
    plain, found = engine.clip_gradients, []

    def look() -> torch.Tensor:
        found.append(whole_norm(engine))
        norm: torch.Tensor = plain()
        found.append(whole_norm(engine))
        return norm

    engine.clip_gradients = look
    reported = driver.train(make_sequences(6)).optimizer.grad_norm
    return reported, found[0], found[1]


def whole_norm(engine: Any) -> float:
    gradients = [parameter.grad for parameter in engine.parameters.values()]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    return float(sum(grad.double().square().sum() for grad in whole) ** 0.5)


@pytest.mark.dist
def test_the_norm_that_clips_is_that_of_all_experts_of_all_ranks(tmp_path: Path, newer: RankPool) -> None:
    for reported, before, after in newer.run(clipped, write_experts(tmp_path / "moe", 4)):
        assert reported == pytest.approx(before, rel=1e-5)
        assert after == pytest.approx(0.05, rel=1e-4)


Weights = dict[str, torch.Tensor]


def kept_and_resumed(rank: int, folder: Path, root: Path) -> tuple[Weights, dict[str, Any]]:
    """Copy weights aside and back; go on from a checkpoint with whole experts, and from theirs with divided ones."""
    driver = build(rank, folder, **OPTIMIZER, **EXPERTS)
    snapshots, store = driver.snapshots(), CheckpointStore(root, model_folder=folder)
    driver.train(make_sequences(6, seed=0))
    first = driver.weights()
    snapshots.save("first")
    store.save(driver.engine, 1, wait=True)
    driver.train(make_sequences(6, seed=1))
    second = driver.weights()
    found: dict[str, Any] = {"trained": differences(second, first)}
    snapshots.restore("first")
    found["restored"] = differences(driver.weights(), first)
    whole = Driver({"backend": "fsdp2", "device": "cpu"} | OPTIMIZER, folder, rank, 2)
    store.load(whole.engine)
    found["loaded whole"] = differences(whole.weights(), first)
    store.save(whole.engine, 2, wait=True)
    whole.train(make_sequences(6, seed=1))
    found["step of whole"] = furthest(whole.weights(), second)[1]
    again = build(rank, folder, **OPTIMIZER, **EXPERTS)
    store.load(again.engine)
    found["loaded divided"] = differences(again.weights(), first)
    again.train(make_sequences(6, seed=1))
    found["step of divided"] = furthest(again.weights(), second)[1]
    store.close()
    return first, found


@pytest.mark.dist
def test_divided_experts_are_kept_aside_checkpointed_and_exported_as_whole_ones(
    tmp_path: Path, newer: RankPool
) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    (first, _), *_ = results = newer.run(kept_and_resumed, folder, tmp_path / "root")
    for _, found in results:
        assert found["trained"] != "none"
        assert [found[name] for name in ("restored", "loaded whole", "loaded divided")] == ["none"] * 3
        assert found["step of whole"] < 1e-5
        assert found["step of divided"] < 1e-5
    export_checkpoint(tmp_path / "root" / "step-00000001", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert differences({name: entry.detach() for name, entry in model.named_parameters()}, first) == "none"


def in_bfloat16(rank: int, folder: Path) -> Any:
    half: dict[str, Any] = {"param_dtype": "bfloat16", "learning_rate": 1e-2, "eps": 1e-3}
    whole = Driver({"backend": "fsdp2", "device": "cpu"} | half, folder, rank, 2)
    return two_steps(build(rank, folder, **EXPERTS, **half)), two_steps(whole)


@pytest.mark.dist
def test_experts_that_the_library_always_computes_in_bfloat16_train_beside_a_model_in_bfloat16(
    tmp_path: Path, ranks: RankPool
) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    for (norms, weights), (norms_whole, weights_whole) in ranks.run(in_bfloat16, folder):
        assert norms == pytest.approx(norms_whole, rel=2e-2)
        assert furthest(weights, weights_whole)[1] < 5e-3, "a step is up to 1e-2"


def through_given(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[float, float, bool]:
    """Compare with a mixture computed by hand: log-probs, the gradient, and whether the experts were those."""
    settings = {**PROBE_SETTINGS, **EXPERTS, **settings, "router_replay": True}
    probe = GradientProbe(lambda: build(rank, folder, **settings), {})
    sequences = with_experts(make_sequences(8))
    log_probs, gradient = by_hand(load_reference(folder), sequences)
    _, worst = furthest(dict(enumerate(probe.driver.infer(sequences))), dict(enumerate(log_probs)))
    found = probe.driver.outputs(sequences, ("routed_experts",))
    pairs = [
        (outputs["routed_experts"], torch.from_numpy(sequence.fields["routed_experts"]))
        for outputs, sequence in zip(found, sequences, strict=True)
    ]
    is_given = all(bool(((mine == given) | (given < 0)).all()) for mine, given in pairs)
    return worst, relative_error(probe.gradient_of(sequences), gradient), is_given


@pytest.mark.dist
@pytest.mark.parametrize(
    "settings",
    [{}, {"memory": {"recompute": True}}, {"packing": False}, {"sequence_parallel_size": 2}],
    ids=["plain", "recomputed", "in rows", "split"],
)
def test_tokens_go_through_given_experts_of_other_ranks(
    tmp_path: Path, newer: RankPool, settings: dict[str, Any]
) -> None:
    for worst, distance, is_given in newer.run(through_given, write_tiny_mixture(tmp_path / "moe"), settings):
        assert worst < 1e-5
        assert distance < 1e-5
        assert is_given


def refused(rank: int, folder: Path) -> str:
    return refusal(lambda: build(rank, folder, **EXPERTS))


@pytest.mark.dist
def test_a_single_expert_a_rank_is_refused(tmp_path: Path, newer: RankPool) -> None:
    for message in newer.run(refused, write_experts(tmp_path / "moe", 2)):
        assert "engine.expert_parallel_size=2 does not fit the 2 experts of model.layers.0.mlp.experts" in message
        assert "at least two" in message


def chunked(rank: int, folder: Path) -> str:
    plan = {"apply_modules": ["model.layers.{*}.mlp"], "chunk_arg_indexs": [0]}
    return refusal(lambda: build(rank, folder, packing=False, memory={"chunk_batch": plan}, **EXPERTS))


@pytest.mark.dist
def test_experts_are_not_run_in_parts_that_other_ranks_may_have_fewer_of(tmp_path: Path, newer: RankPool) -> None:
    for message in newer.run(chunked, write_experts(tmp_path / "moe", 4)):
        assert "model.layers.0.mlp would run once for each part of the rows" in message
        assert "model.layers.0.mlp.experts in it talks to other ranks" in message


@pytest.mark.dist
def test_a_release_that_computes_experts_in_bfloat16_is_found_out(tmp_path: Path, ranks: RankPool) -> None:
    for message in ranks.run(refused, write_experts(tmp_path / "moe", 4)):
        assert "the installed fsdp_turbo computes" in message
        assert message.endswith("set engine.param_dtype=bfloat16")
