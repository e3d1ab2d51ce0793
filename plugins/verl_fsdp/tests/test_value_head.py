"""Critics: which class is loaded, what becomes of the last layer, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import ConfigError, ModelError, UnsupportedError
from verl_engine.contract.validation import validate
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import make_sequences
from verl_engine.testing.conformance.values import sequence_values
from verl_engine.testing.tiny_models import tiny_config, write_tiny_critic
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.loading import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks

CRITIC = Fsdp2Config(learning_rate=1e-3, head="value")


def dropouts(model: torch.nn.Module) -> list[float]:
    return [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]


def test_a_language_models_folder_gives_its_layers_and_a_new_head(model_folder: Path) -> None:
    model: Any = load_model(CRITIC, model_folder)
    assert type(model) is transformers.Qwen3ForTokenClassification
    assert model.score.weight.shape == (1, 32)
    trunk = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).model
    pairs = zip(model.model.parameters(), trunk.parameters(), strict=True)
    assert all(torch.equal(own, theirs) for own, theirs in pairs)


def test_a_new_head_is_drawn_by_the_seed(model_folder: Path) -> None:
    first, same, other = (
        load_model(Fsdp2Config(learning_rate=1e-3, head="value", seed=seed), model_folder) for seed in (0, 0, 1)
    )
    weights = [model.get_parameter("score.weight") for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_critics_folder_gives_its_head(tmp_path: Path) -> None:
    folder = write_tiny_critic(tmp_path / "critic")
    model: Any = load_model(CRITIC, folder)
    assert model.score.bias.tolist() == [0.5]


def test_a_reward_models_head_is_taken(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**tiny_config())
    config.num_labels = 1
    reward = transformers.Qwen3ForSequenceClassification(config)
    reward.save_pretrained(tmp_path)
    model: Any = load_model(CRITIC, tmp_path)
    assert torch.equal(model.score.weight, reward.score.weight)
    assert model.score.bias.tolist() == [0.0]  # which a reward model does not have


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**tiny_config()),  # says nothing, for which transformers takes 0.1
        transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=4),
        transformers.GPTNeoXConfig(**tiny_config()),
    ],
    ids=["qwen3", "gpt2", "gpt_neox"],
)
def test_the_head_has_no_dropout(tmp_path: Path, config: transformers.PreTrainedConfig) -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model: Any = load_model(Fsdp2Config(learning_rate=1e-3, head="value", packing=False), tmp_path)
    assert model.dropout.p == 0.0
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["classifier_dropout"] == 0.0
    again: Any = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert again.num_labels == 1
    assert again.dropout.p == 0.0


def test_a_model_type_without_a_token_classifier_is_refused(tmp_path: Path) -> None:
    config = transformers.CohereConfig(**tiny_config())
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"engine.head=value: .* model type 'cohere' .* such as llama, qwen3"):
        load_model(CRITIC, tmp_path)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**tiny_config())
    config.num_labels = 3
    transformers.Qwen3ForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds a classifier of 3 labels, and a value is one number"):
        load_model(CRITIC, tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not hold a critic .* that transformers can load"):
        load_model(CRITIC, tmp_path)


def test_entropy_of_a_critic_is_refused() -> None:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "head": "value", "entropy": "value"}
    with pytest.raises(ConfigError, match="entropy=value is of a language model's head, and head=value"):
        validate(Fsdp2Config, section, at="engine")


def values(_rank: int, folder: Path, settings: dict[str, Any]) -> list[torch.Tensor]:
    """Return each sequence's values from one micro-batch."""
    section = {"learning_rate": 1e-3, "device": "cpu", "head": "value", **settings}
    driver = Driver(section, folder, rank=0, world_size=1)
    output = driver.engine.forward(PackedBatch.from_sequences(make_sequences(2)), 1.0)
    with pytest.raises(UnsupportedError, match=r"gives no log-probs; set engine\.head=language_model"):
        output.log_probs  # noqa: B018 - asking for it is the test
    return driver.infer(make_sequences(9), 0.5)


@pytest.mark.dist
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_values_of_a_micro_batch_are_those_of_each_sequence_alone(
    tmp_path: Path, backend: str, packing: bool, on_ranks: OnRanks
) -> None:
    folder = write_tiny_critic(tmp_path / "critic")
    (found,) = on_ranks(values, folder, {"backend": backend, "packing": packing}, world_size=1)
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    for sequence, part in zip(make_sequences(9), found, strict=True):
        with torch.no_grad():
            right = torch.where(torch.from_numpy(sequence.loss_mask), sequence_values(model, sequence), 0.0)
        torch.testing.assert_close(part, right, rtol=1e-5, atol=1e-5)  # the temperature plays no part
