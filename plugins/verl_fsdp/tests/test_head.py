"""The output layer: which models may leave their logits out, that they do, and that the rest stay right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from core.tests.largest_tensor import LargestTensor
from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import ModelError
from verl_engine.testing.conformance import EngineConformance
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.log_probs import sequence_entropy
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.tiny_models import tiny_config, write_tiny_model
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.forward.head import Head
from verl_fsdp.forward.model_run import ModelRun
from verl_fsdp.forward.output_layer import ending_of, forward_of

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

TINY = tiny_config()
OPT: dict[str, Any] = {"word_embed_proj_dim": 32, "ffn_dim": 64, "do_layer_norm_before": True}
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "qwen3": transformers.Qwen3Config(**TINY),
    "qwen3_moe": transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "bias": transformers.PhiConfig(**TINY),
    "gemma2": transformers.Gemma2Config(**TINY, final_logit_softcapping=2.0, attn_logit_softcapping=None),
    "cohere": transformers.CohereConfig(**TINY, logit_scale=0.25),
    "granite": transformers.GraniteConfig(**TINY, logits_scaling=4.0),
    "opt": transformers.OPTConfig(**TINY, **OPT),
}
ENDINGS = {
    "qwen3": "linear",
    "qwen3_moe": "linear",
    "bias": "linear",
    "gemma2": "per token",
    "cohere": "per token",
    "granite": "per token",
    "opt": "unknown",
}


def build(kind: str) -> Any:
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ENDINGS)
def test_how_known_models_end(kind: str, device: str) -> None:
    with torch.device(device):
        model = build(kind)
    names = list(model.state_dict())
    assert ending_of(model) == ENDINGS[kind]
    assert list(model.state_dict()) == names
    assert "forward" not in vars(model.get_output_embeddings())


class Changing(transformers.Qwen3ForCausalLM):
    """Does something to its logits."""

    change: Any = torch.clone

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=type(self).change(self.lm_head(hidden)))


@pytest.mark.parametrize(
    ("change", "ending"),
    [
        (lambda logits: logits, "linear"),
        (lambda logits: logits.float(), "linear"),
        (lambda logits: logits * 2, "per token"),
        (lambda logits: logits.mul_(2), "per token"),  # the very tensor, with other values
        (lambda logits: logits[:, 1:], "unknown"),
        (lambda logits: logits[0], "unknown"),
        (lambda _: None, "unknown"),
        (lambda logits: logits.no_such_attribute, "unknown"),
    ],
    ids=["nothing", "float", "scaled", "scaled_in_place", "shifted", "no_rows", "none", "fails"],
)
def test_a_model_that_changes_its_logits_is_not_taken_for_a_linear_one(
    monkeypatch: pytest.MonkeyPatch, change: Any, ending: str
) -> None:
    monkeypatch.setattr(Changing, "change", staticmethod(change))
    model = Changing(CONFIGS["qwen3"])  # type: ignore[no-untyped-call]
    assert ending_of(model) == ending


def test_a_layer_of_another_class_computes_its_own_logits() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
            return super().forward(input) * 2

    model = build("qwen3")
    model.lm_head = Scaled(32, 32, bias=False)
    assert ending_of(model) == "per token"


def test_an_adapter_on_the_output_layer_is_not_left_out() -> None:
    peft = pytest.importorskip("peft")
    model = build("qwen3")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)
    assert ending_of(model) == "per token"


def test_a_model_without_an_output_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3")
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    assert ending_of(model) == "unknown"


def test_a_layer_computes_its_own_again_after_an_exception() -> None:
    layer = torch.nn.Linear(2, 2)
    with forward_of(layer, torch.neg):
        assert layer(torch.ones(1)).tolist() == [-1.0]
    with pytest.raises(RuntimeError), forward_of(layer, torch.linalg.inv):
        layer(torch.ones(1))
    assert layer(torch.ones(2)).shape == (2,)
    vars(layer)["forward"] = torch.sign  # as tools do that wrap layers
    with forward_of(layer, torch.neg):
        pass
    assert layer(torch.ones(1)).tolist() == [1.0]


def test_a_model_that_begins_to_change_its_logits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changing, "change", staticmethod(lambda logits: logits))
    model = Changing(CONFIGS["qwen3"])  # type: ignore[no-untyped-call]
    head = Head(model, Fsdp2Config(learning_rate=1e-3))
    ids = torch.tensor([[1, 2, 3]])
    run = ModelRun({"input_ids": ids}, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert head.numbers(model, run, ids[0, 1:, None], 1.0, 0).shape == (2, 1)
    monkeypatch.setattr(Changing, "change", staticmethod(lambda logits: logits * 2))
    with pytest.raises(ModelError, match="Changing treats the output of its last layer otherwise"):
        head.numbers(model, run, ids[0, 1:, None], 1.0, 0)


def numbers(_rank: int, folder: Path, settings: dict[str, Any], temperature: float) -> list[list[torch.Tensor]]:
    """Return log-probs and entropy of each sequence, from one micro-batch."""
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "entropy": "gradient", **settings}
    engine = Driver(section, folder, rank=0, world_size=1).engine
    engine.set_training(False)
    batch = PackedBatch.from_sequences(make_sequences(9))
    with torch.no_grad():
        output = engine.forward(batch, temperature)
    return [batch.unpack(output.log_probs), batch.unpack(output.entropy)]


def write_model(folder: Path, kind: str) -> Path:
    """Write a tiny model of a kind, with weights so large that soft caps and scales matter."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = build(kind)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "packing"),
    [("bias", True), ("gemma2", True), ("gemma2", False), ("cohere", True), ("granite", True), ("opt", False)],
)
def test_log_probs_and_entropy_are_right_however_the_model_ends(
    tmp_path: Path, kind: str, packing: bool, on_ranks: OnRanks
) -> None:
    folder = write_model(tmp_path / kind, kind)
    settings = {"packing": packing, "logit_chunk": 3}
    ((log_probs, entropies),) = on_ranks(numbers, folder, settings, 0.7, world_size=1)
    model = load_reference(folder)
    for sequence, log_prob, entropy in zip(make_sequences(9), log_probs, entropies, strict=True):
        torch.testing.assert_close(log_prob, masked_log_probs(model, sequence, 0.7), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            right = torch.where(torch.from_numpy(sequence.loss_mask), sequence_entropy(model, sequence, 0.7), 0.0)
        torch.testing.assert_close(entropy, right, rtol=1e-5, atol=1e-5)


@pytest.mark.dist
def test_in_bfloat16_log_probs_are_as_near_as_bfloat16_allows(tmp_path: Path, on_ranks: OnRanks) -> None:
    folder = write_model(tmp_path / "qwen3", "qwen3")
    ((log_probs, _),) = on_ranks(numbers, folder, {"param_dtype": "bfloat16"}, 1.0, world_size=1)
    model = load_reference(folder)
    worst = max(
        float((found - masked_log_probs(model, sequence)).abs().max())
        for found, sequence in zip(log_probs, make_sequences(9), strict=True)
    )
    assert 1e-5 < worst < 0.2


def largest_tensor(_rank: int, folder: Path, backend: str) -> tuple[int, int]:
    """Return the size of the largest tensor of a training pass, and the number of loss tokens."""
    section = {"backend": backend, "learning_rate": 1e-3, "device": "cpu", "logit_chunk": 8, "entropy": "gradient"}
    engine = Driver(section, folder, rank=0, world_size=1).engine
    sequences = make_sequences(80)
    for sequence in sequences:
        sequence.loss_mask[1:] = True
    batch = PackedBatch.from_sequences(sequences)
    with LargestTensor() as made:
        output = engine.forward(batch, 1.0)
        (output.log_probs.sum() + output.entropy.sum()).backward()
    return made.numel, len(batch.loss_positions)


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_the_logits_of_all_tokens_never_exist(tmp_path: Path, backend: str, on_ranks: OnRanks) -> None:
    vocabulary = 3000
    folder = write_tiny_model(tmp_path / "wide", vocab_size=vocabulary)
    ((largest, num_tokens),) = on_ranks(largest_tensor, folder, backend, world_size=1)
    assert num_tokens > 500
    assert largest < num_tokens * vocabulary / 4  # all weights together, in FSDP1's flat form, are the largest


class TestSmallChunks(EngineConformance):
    """Many chunks of tokens, and of the vocabulary, with tied weights and ranks without data."""

    backend = "fsdp2"
    settings = {"logit_chunk": 3}  # noqa: RUF012 - as the kit has it
    only = ("log_probs/entropy", "accumulation/all_ranks", "accumulation/tied", "accumulation/rank_without_data")


class TestSmallChunksOfFsdp1(TestSmallChunks):
    """The same, where weights are views of flat ones."""

    backend = "fsdp"
