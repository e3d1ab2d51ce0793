"""Adapters: trained alone, exported merged, switched off, written for peft."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

from plugins.verl_fsdp.tests.refusals import message_of
from verl_engine.contract.engine_config import LoraConfig
from verl_engine.contract.errors import ModelError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.weights.module_weights import local_tensors
from verl_engine.engine.weights.shards import offsets_and_shape, shard_of
from verl_engine.testing.conformance.driver import Driver, same
from verl_engine.testing.conformance.gradient_probe import PROBE_SETTINGS
from verl_engine.testing.conformance.reference import (
    accumulate,
    load_reference,
    make_sequences,
    masked_log_probs,
    relative_error,
)
from verl_fsdp.model import lora

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks, RankPools

ADAPTER = {"rank": 4, "alpha": 8.0}
SECTION = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu", "lora": ADAPTER}


def trained_driver(folder: Path, rank: int, **settings: Any) -> Driver:
    """An engine whose adapter has an effect."""
    driver = Driver({**SECTION, **settings}, folder, rank, 2)
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    return driver


def everything(rank: int, folder: Path, out: Path) -> dict[str, Any]:
    """Train, then export in every way."""
    driver = Driver(SECTION, folder, rank, 2)
    engine: Any = driver.engine
    before = driver.weights()
    trained = [name for name, entry in engine.parameters.items() if entry.requires_grad]
    driver.train(make_sequences(8))
    driver.train(make_sequences(8, seed=1))
    after = driver.weights()
    engine.save_pretrained(out / "merged")
    engine.save_adapter(out / "adapter")
    sequences = make_sequences(5, seed=2)
    with engine.disable_adapter(), engine.disable_adapter():
        inside = driver.infer(sequences)
    (reference,) = driver.worker.infer_batch([sequences], disable_adapter=True)
    snapshot = driver.snapshots().save("a")
    return {
        "trained": trained,
        "frozen": {name: entry.full_tensor() for name, entry in engine.parameters.items() if "base_layer" in name},
        "before": before,
        "after": after,
        "delivered": driver.delivered(3000),
        "adapter": (driver.delivered(3000, adapter_only=True), engine.adapter_config()),
        "log_probs": driver.infer(sequences),
        "inside": inside,
        "reference": [torch.from_numpy(part) for part in reference],
        "snapshot_bytes": snapshot.num_bytes,
        "buffer_bytes": sum(buffer.nbytes for buffer in engine.module.buffers()),
        "trained_bytes": sum(engine.parameters[name].to_local().nbytes for name in trained),
        "num_states": len(engine.optimizer.state),
    }


@pytest.fixture(scope="module")
def run(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, rank_pools: RankPools
) -> tuple[list[dict[str, Any]], Path]:
    """What two ranks found, and the folder they wrote to."""
    out = tmp_path_factory.mktemp("lora")
    return rank_pools.run(everything, model_folder, out), out


@pytest.mark.dist
def test_only_adapters_are_trained(run: tuple[list[dict[str, Any]], Path], model_folder: Path) -> None:
    for found in run[0]:
        assert len(found["trained"]) == 2 * 7 * 2  # layers, linear layers in each, matrices
        assert all(".lora_A.default." in name or ".lora_B.default." in name for name in found["trained"])
        assert found["num_states"] == len(found["trained"])
        plain = load_reference(model_folder).state_dict()
        for name, tensor in found["frozen"].items():
            assert torch.equal(tensor, plain[name.replace(".base_layer", "")])


@pytest.mark.dist
def test_a_fresh_adapter_has_no_effect(run: tuple[list[dict[str, Any]], Path], model_folder: Path) -> None:
    plain = dict(load_reference(model_folder).named_parameters())
    for found in run[0]:
        assert list(found["before"]) == list(plain)
        assert all(torch.equal(found["before"][name], tensor) for name, tensor in plain.items())


@pytest.mark.dist
def test_weight_sync_delivers_adapters(run: tuple[list[dict[str, Any]], Path], model_folder: Path) -> None:
    """What arrives through buckets after a step is a plain model with the adapters merged: peft merges the same."""
    ranks, out = run
    base = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    merged = dict(peft.PeftModel.from_pretrained(base, out / "adapter").merge_and_unload().named_parameters())
    for found in ranks:
        changed = [
            name for name, tensor in found["before"].items() if not torch.equal(found["delivered"][name], tensor)
        ]
        assert len(changed) == 2 * 7
        assert list(found["delivered"]) == list(merged)
        for name, tensor in merged.items():
            torch.testing.assert_close(found["delivered"][name], tensor, rtol=0, atol=1e-7)
            assert torch.equal(found["delivered"][name], found["after"][name])


@pytest.mark.dist
def test_a_saved_folder_is_the_merged_model(run: tuple[list[dict[str, Any]], Path]) -> None:
    ranks, out = run
    model = load_reference(out / "merged")
    for found in ranks:
        for sequence, log_probs in zip(make_sequences(5, seed=2), found["log_probs"], strict=True):
            torch.testing.assert_close(masked_log_probs(model, sequence), log_probs, rtol=0, atol=1e-5)


@pytest.mark.dist
def test_peft_loads_a_saved_adapter(run: tuple[list[dict[str, Any]], Path], model_folder: Path) -> None:
    ranks, out = run
    config = json.loads((out / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8.0, "CAUSAL_LM")
    model = peft.PeftModel.from_pretrained(load_reference(model_folder), out / "adapter")
    for found in ranks:
        for sequence, log_probs in zip(make_sequences(5, seed=2), found["log_probs"], strict=True):
            torch.testing.assert_close(masked_log_probs(model, sequence), log_probs, rtol=0, atol=1e-5)


@pytest.mark.dist
def test_who_holds_the_base_model_takes_the_adapter_alone(
    run: tuple[list[dict[str, Any]], Path], model_folder: Path
) -> None:
    """Unmerged, from buckets, as peft and vLLM take adapters: no file in between."""
    for found in run[0]:
        weights, config = found["adapter"]
        model = peft.get_peft_model(load_reference(model_folder), peft.LoraConfig(**config))
        loaded: Any = peft.set_peft_model_state_dict(model, weights)
        assert not loaded.unexpected_keys
        assert weights.keys().isdisjoint(found["delivered"])
        for sequence, log_probs in zip(make_sequences(5, seed=2), found["log_probs"], strict=True):
            torch.testing.assert_close(masked_log_probs(model, sequence), log_probs, rtol=0, atol=1e-5)


@pytest.mark.dist
def test_without_its_adapter_the_model_is_the_base_policy(
    run: tuple[list[dict[str, Any]], Path], model_folder: Path, on_ranks: OnRanks
) -> None:
    """Bit for bit what a forward-only engine of the base folder says; nested, and through the worker."""
    reference = on_ranks(base_log_probs, model_folder)
    for found, expected in zip(run[0], reference, strict=True):
        for way in ("inside", "reference"):
            assert all(torch.equal(mine, right) for mine, right in zip(found[way], expected, strict=True))
        assert not all(torch.equal(mine, right) for mine, right in zip(found["log_probs"], expected, strict=True))


def base_log_probs(rank: int, folder: Path) -> list[torch.Tensor]:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "forward_only": True}
    return Driver(section, folder, rank, 2).infer(make_sequences(5, seed=2))


@pytest.mark.dist
def test_a_snapshot_holds_adapters_and_buffers_only(run: tuple[list[dict[str, Any]], Path]) -> None:
    for found in run[0]:
        assert 0 < found["trained_bytes"] <= found["snapshot_bytes"]
        # The storage of a snapshot is aligned: 64 bytes a tensor at most.
        assert found["snapshot_bytes"] <= found["trained_bytes"] + found["buffer_bytes"] + 64 * 40


def gradients(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The adapter's gradients after an accumulation over two micro-batches on each of two ranks."""
    driver = Driver({**SECTION, **settings, **PROBE_SETTINGS}, folder, rank, 2)
    engine: Any = driver.engine
    found: dict[str, torch.Tensor] = {}
    start_from(engine, seed=3)
    clip = engine.clip_gradients

    def read_and_clip() -> torch.Tensor:
        for name, entry in engine.parameters.items():
            if entry.grad is not None:
                found[name] = entry.grad.full_tensor().clone()
        norm: torch.Tensor = clip()
        return norm

    engine.clip_gradients = read_and_clip
    driver.train(make_sequences(8))
    return found


def start_from(model: Any, seed: int) -> None:
    """Give B other values than zeros, the same wherever it is: or A would have no gradient."""
    generator = torch.Generator().manual_seed(seed)
    named = model.parameters if isinstance(model.parameters, dict) else dict(model.named_parameters())
    for name in sorted(name for name in named if ".lora_B." in name):
        value = 0.1 * torch.randn(named[name].shape, generator=generator)
        for _, live in local_tensors([(name, named[name])]):
            live.copy_(shard_of(value, *offsets_and_shape(named[name])))


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"gradient_sync": "every_micro_batch"}], ids=["last", "every"])
def test_gradients_are_those_of_peft_in_one_process(
    model_folder: Path, settings: dict[str, Any], on_ranks: OnRanks
) -> None:
    model = load_reference(model_folder)
    lora.inject_adapters(model, LoraConfig(rank=4, alpha=8.0), seed=0)
    start_from(model, seed=3)
    accumulate(model, make_sequences(8))
    expected = {name: entry.grad for name, entry in model.named_parameters() if entry.grad is not None}
    for found in on_ranks(gradients, model_folder, settings):
        assert found.keys() == expected.keys()
        assert relative_error(found, expected) <= 1e-5


def test_adapters_begin_the_same_by_seed_and_leave_random_numbers_alone(model_folder: Path) -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(9)
        model = load_reference(model_folder)
        before = torch.get_rng_state()
        lora.inject_adapters(model, LoraConfig(rank=4), seed)
        assert torch.equal(torch.get_rng_state(), before)
        models.append(dict(model.named_parameters()))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert models[0][name].dtype == torch.float32
    assert torch.equal(models[0][name], models[1][name])
    assert not torch.equal(models[0][name], models[2][name])
    assert not models[0][name.replace("lora_A", "lora_B")].any()


def test_a_model_without_weights_gets_adapters_without_weights(model_folder: Path) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model_folder))
        lora.inject_adapters(model, LoraConfig(rank=4), 0)
    assert all(entry.is_meta for entry in model.parameters())
    full = load_reference(model_folder)
    lora.inject_adapters(full, LoraConfig(rank=4), 0)
    shapes = {name: (entry.shape, entry.requires_grad) for name, entry in full.named_parameters()}
    assert {name: (entry.shape, entry.requires_grad) for name, entry in model.named_parameters()} == shapes


def test_layers_are_named_by_their_ends(model_folder: Path) -> None:
    model = load_reference(model_folder)
    assert lora.target_names(model, ("q_proj", "0.mlp.up_proj")) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    every = lora.target_names(model, ("all-linear",))
    assert len(every) == 14
    assert "lm_head" not in every


@pytest.mark.parametrize("pattern", ["proj", "lm_head", "embed_tokens", "no_such_layer"])
def test_unknown_layers_are_refused_with_the_known_ones(model_folder: Path, pattern: str) -> None:
    with pytest.raises(ModelError) as caught:
        lora.target_names(load_reference(model_folder), (pattern,))
    assert str(caught.value) == (
        f"engine.lora.target_modules={pattern!r} fits no linear layer of Qwen3ForCausalLM; they are down_proj, "
        "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear"
    )


def test_only_some_layers_are_adapted_where_a_name_is_not_enough(model_folder: Path) -> None:
    model = load_reference(model_folder)
    lora.inject_adapters(model, LoraConfig(rank=2, target_modules=("0.self_attn.q_proj",)), 0)
    adapted = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert adapted == ["model.layers.0.self_attn.q_proj.lora_A.default.weight"]


def import_refused(rank: int, folder: Path) -> list[str]:
    """What an engine with an adapter does not take, and one without does not do."""
    adapted = Driver(SECTION, folder, rank, 2)
    weights = adapted.weights()
    plain = Driver({**SECTION, "lora": None}, folder, rank, 2)
    return [
        message_of(lambda: adapted.engine.load_full_weights(weights.items())),
        message_of(lambda: adapted.engine.load_weight_shards(adapted.engine.weight_shards())),
        message_of(plain.engine.disable_adapter),
        message_of(lambda: plain.engine.save_adapter(folder / "never")),
        message_of(lambda: plain.delivered(3000, adapter_only=True)),
    ]


@pytest.mark.dist
def test_merged_weights_are_not_taken_for_an_adapters(model_folder: Path, on_ranks: OnRanks) -> None:
    for full, shards, *without in on_ranks(import_refused, model_folder):
        assert full == shards
        assert full.startswith("engine.lora: full weights cannot be told apart")
        assert set(without) == {"engine.lora is not set: this engine has no adapter"}


def resumed(rank: int, folder: Path, out: Path) -> tuple[bool, bool, set[str]]:
    """Train, save, go on; resume in a fresh engine, go on; whether both are the same, and what is in the checkpoint."""
    first, second = trained_driver(folder, rank), Driver(SECTION, folder, rank, 2)
    with closing(CheckpointStore(out, timeout_s=60.0)) as store:
        store.save(first.engine, 2, wait=True)
        store.load(second.engine)
    is_there = same(first.weights(), second.weights())
    for driver in (first, second):
        driver.train(make_sequences(8, seed=5))
    names = set(first.engine.state_dict()["model"])
    return is_there, same(first.weights(), second.weights()), names


@pytest.mark.dist
def test_an_adapter_resumes_from_a_checkpoint_under_the_names_of_peft(
    model_folder: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    model = load_reference(model_folder)
    lora.inject_adapters(model, LoraConfig(rank=4, alpha=8.0), 0)
    for is_there, goes_on, names in on_ranks(resumed, model_folder, tmp_path):
        assert is_there
        assert goes_on
        assert names == {name for name, _ in model.named_parameters()}


def after_exception(rank: int, folder: Path) -> bool:
    """Whether the adapter is back after an exception."""
    driver = trained_driver(folder, rank)
    sequences = make_sequences(3)
    before = driver.infer(sequences)
    with pytest.raises(RuntimeError), driver.engine.disable_adapter():
        raise RuntimeError
    return all(torch.equal(now, then) for now, then in zip(driver.infer(sequences), before, strict=True))


@pytest.mark.dist
def test_the_adapter_is_back_after_an_exception(model_folder: Path, on_ranks: OnRanks) -> None:
    assert on_ranks(after_exception, model_folder) == [True, True]


def value_head(rank: int, folder: Path, out: Path) -> tuple[list[str], float]:
    """Train a critic's adapter and head; save both."""
    driver = Driver({**SECTION, "head": "value"}, folder, rank, 2)
    engine: Any = driver.engine
    trained = [name for name, entry in engine.parameters.items() if entry.requires_grad and ".lora_" not in name]
    before = driver.weights()["score.weight"]
    driver.step(driver.micro_batches(make_sequences(8)), squared_values)
    engine.save_adapter(out / "critic")
    return trained, float((driver.weights()["score.weight"] - before).abs().max())


def squared_values(output: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss through the values."""
    return ((output.values - 1.0)[batch.loss_mask] ** 2).sum(), {}


@pytest.mark.dist
def test_a_value_head_is_trained_whole_beside_the_adapter(
    model_folder: Path, tmp_path: Path, on_ranks: OnRanks
) -> None:
    for trained, change in on_ranks(value_head, model_folder, tmp_path):
        assert all(name.startswith("score.") for name in trained)
        assert "score.weight" in trained
        assert change > 0
    base = transformers.AutoModelForTokenClassification.from_pretrained(model_folder, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "critic")
    names = [name for name, _ in loaded.named_parameters() if "modules_to_save" in name]
    assert any("score" in name for name in names)


def test_a_critics_head_is_trained_whole_whatever_the_model_calls_it() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_labels = 1
    model = transformers.GPTNeoXForTokenClassification(config)
    lora.inject_adapters(model, LoraConfig(rank=2), seed=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if not lora.is_adapter_weight(name)] == ["classifier.weight", "classifier.bias"]
    assert not any(name.startswith("classifier.lora") for name in trained)
