"""Megatron's model of a folder against that of transformers, layer options and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from plugins.verl_megatron_mindspeed.tests.model_families import (
    FAMILIES,
    LENGTHS,
    VOCABULARY,
    build,
    family_config,
    plain,
    run,
    tokens,
    write_family,
)
from verl_engine.contract.errors import ConfigError, ModelError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.hf_config import read_hf_config

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with large weights."""
    return write_family(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


def logits(folder: Path, **fields: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return those of packed sequences, of one after the other, and of transformers."""
    model = build(folder, **fields)
    model.chunks[0].eval()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokens()
    with torch.no_grad():
        single = torch.cat([run(model, part, (len(part),)) for part in ids.split(LENGTHS)])
        return run(model, ids), single, plain(reference, ids)


def off_by(_rank: int, folder: Path, **fields: Any) -> tuple[float, float]:
    """Return how far packed logits are from those of single sequences, and from those of transformers."""
    packed, single, expected = logits(folder, **fields)
    return (packed - single).abs().max().item(), (packed - expected).abs().max().item()


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(ranks: RankPool, tmp_path: Path, family: str) -> None:
    for from_single, from_plain in ranks.run(off_by, write_family(tmp_path, family)):
        assert from_single < TOLERANCE
        assert from_plain < TOLERANCE


def test_stretched_positions_are_seen_by_that_test(tmp_path: Path) -> None:
    family = "llama with stretched positions"
    stretched = transformers.AutoModelForCausalLM.from_pretrained(write_family(tmp_path / "1", family)).eval()
    folder = write_family(tmp_path / "2", family, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    usual = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (plain(stretched, tokens()) - plain(usual, tokens())).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.02)])
def test_half_precision_gives_float32_logits(ranks: RankPool, qwen3: Path, dtype: str, tolerance: float) -> None:
    for packed, _, expected in ranks.run(_half_logits, qwen3, dtype):
        assert packed.dtype == torch.float32
        assert 0 < (packed - expected).abs().max() < tolerance


def _half_logits(_rank: int, folder: Path, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return logits(folder, param_dtype=dtype)


def test_forward_only_has_no_gradients(ranks: RankPool, qwen3: Path) -> None:
    assert ranks.run(_trained, qwen3, True) == [False, False]
    assert ranks.run(_trained, qwen3, False) == [True, True]


def _trained(_rank: int, folder: Path, forward_only: bool) -> bool:
    model = build(folder, forward_only=forward_only)
    return any(parameter.requires_grad for parameter in model.chunks[0].parameters())


def test_mbridge_keeps_its_tables(ranks: RankPool, tmp_path: Path) -> None:
    """It would write into a table of its class that untied models then read."""
    assert ranks.run(_output_names, write_family(tmp_path, "qwen2, tied")) == ["lm_head.weight"] * 2


def _output_names(_rank: int, folder: Path) -> str:
    from mbridge.models import Qwen2Bridge

    build(folder)
    return str(Qwen2Bridge._DIRECT_MAPPING["output_layer.weight"])


@pytest.mark.parametrize("family", ["llama, tied", "qwen2, tied", "qwen3_moe, tied"])
def test_a_tied_output_layer_is_the_embedding_by_name(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """For some model types mbridge says ``lm_head``, which a tied folder does not hold; pipelines ask for it."""
    assert ranks.run(_tied_names, write_family(tmp_path, family)) == [["model.embed_tokens.weight"]] * 2


def _tied_names(_rank: int, folder: Path) -> list[str]:
    model = build(folder)
    assert model.tied
    return model.hf_names("output_layer.weight")


def test_rows_that_fill_the_vocabulary_up_are_zero(ranks: RankPool, qwen3: Path) -> None:
    shapes = ranks.run(_last_rows, qwen3)
    assert shapes == [((VOCABULARY + 1) // 2, False), ((VOCABULARY + 1) // 2, True)]


def _last_rows(_rank: int, folder: Path) -> tuple[int, bool]:
    model = build(folder, tensor_parallel_size=2)
    part = model.parts()[0]
    weights = (part.embedding.word_embeddings.weight, part.output_layer.weight)
    return len(weights[0]), all(bool((weight[-1] == 0).all()) for weight in weights)


def test_each_stage_has_its_layers(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3", num_hidden_layers=4)
    first, last = ranks.run(_layers, folder)
    assert first == [["decoder.layers.0", "embedding"], ["decoder.layers.2"]]
    assert last == [["decoder.layers.1"], ["decoder.final_layernorm", "decoder.layers.3", "output_layer"]]


def _layers(_rank: int, folder: Path) -> list[list[str]]:
    model = build(folder, pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)
    found = []
    for index, part in enumerate(model.parts()):
        names = [model.global_name(index, name).split(".") for name, _ in part.named_parameters()]
        found.append(
            sorted({".".join(name[: 3 if "layers" in name else 2 if "decoder" in name else 1]) for name in names})
        )
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3, tied", "llama"])
def test_a_new_head_is_the_one_that_transformers_draws(ranks: RankPool, tmp_path: Path, family: str) -> None:
    for is_same, distance in ranks.run(_against_transformers, write_family(tmp_path, family)):
        assert is_same
        assert distance < TOLERANCE


def _against_transformers(_rank: int, folder: Path) -> tuple[bool, float]:
    model = build(folder, head="value", seed=5)
    torch.manual_seed(5)
    critic = transformers.AutoModelForTokenClassification.from_pretrained(
        folder, config=model.hf_config, dtype=torch.float32
    ).eval()
    head: Any = model.chunks[0].eval().output_layer
    with torch.no_grad():
        values = run(model, tokens())
    is_same = torch.equal(head.weight, critic.score.weight) and torch.equal(head.bias, critic.score.bias)
    return is_same, (values - plain(critic, tokens())).abs().max().item()


def test_its_weights_have_transformers_names(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_names, write_family(tmp_path, "qwen3, tied")) == [["score.weight", "score.bias"]] * 2


def _names(_rank: int, folder: Path) -> list[str]:
    model = build(folder, head="value")
    assert not model.tied
    return [name for part in ("weight", "bias") for name in model.hf_names(f"output_layer.{part}")]


def test_its_config_is_that_of_a_token_classifier(tmp_path: Path) -> None:
    found = read_hf_config(MegatronConfig(head="value"), write_family(tmp_path, "qwen2"))
    assert found.architectures == ["Qwen2ForTokenClassification"]
    assert (found.num_labels, found.classifier_dropout) == (1, 0.0)


def test_a_classifier_of_more_labels_is_refused(tmp_path: Path) -> None:
    config = family_config("qwen3", num_labels=3, architectures=["Qwen3ForTokenClassification"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds a classifier of 3 labels, and a value is one number"):
        read_hf_config(MegatronConfig(head="value"), tmp_path)


def test_a_model_type_without_token_classifier_is_refused(tmp_path: Path) -> None:
    transformers.CLIPTextConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"engine.head=value: transformers has no token classifier"):
        read_hf_config(MegatronConfig(head="value"), tmp_path)


OTHER_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"moe_router_dtyp": "fp32"}, "has no such field; did you mean moe_router_dtype"),
    ({"num_layers": 3}, "transformer_options.num_layers: it says which model it is"),
    ({"deallocate_pipeline_outputs": True}, "deallocate_pipeline_outputs: the engine sets it itself"),
    ({"overlap_p2p_comm_warmup_flush": True}, "overlap_p2p_comm_warmup_flush: the engine sets it itself"),
    ({"perform_initialization": True}, "perform_initialization: the engine sets it itself"),
    ({"moe_grouped_gemm": True}, "moe_grouped_gemm=true needs Transformer Engine"),
    ({"moe_permute_fusion": True}, "moe_permute_fusion=true needs Transformer Engine"),
    ({"cpu_offloading": True}, "cpu_offloading=true needs Transformer Engine"),
    ({"test_mode": True}, "test_mode=true needs Transformer Engine"),
    ({"enable_cuda_graph": True}, "enable_cuda_graph: the engine sets it itself"),
    # With it only one stage would raise, and the other wait.
    ({"num_microbatches_with_partial_activation_checkpoints": 1}, "checkpoints: the engine sets it itself"),
    ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff: it would add to the gradient"),
    ({"attention_backend": "abacus"}, "Megatron refuses this config"),
    ({"fp8": "e4m3", "first_last_layers_bf16": True, "fp8_recipe": "delayed"}, "Megatron refuses this config"),
]


def test_options_that_megatron_lacks_or_that_are_not_for_the_config_are_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    options = [options for options, _ in OTHER_OPTIONS]
    for found in ranks.run(_refusals, write_family(tmp_path, "qwen3"), options):
        for message, (_, expected) in zip(found, OTHER_OPTIONS, strict=True):
            assert expected in message


def _refusals(_rank: int, folder: Path, all_options: list[dict[str, Any]]) -> list[str]:
    found = []
    for options in all_options:
        with pytest.raises(ConfigError) as caught:
            build(folder, transformer_options=options)
        found.append(str(caught.value))
    return found


def test_options_reach_megatron(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_option, write_family(tmp_path, "qwen3_moe")) == ["fp32", "fp32"]


def _option(_rank: int, folder: Path) -> str:
    return str(build(folder, transformer_options={"moe_router_dtype": "fp32"}).transformer.moe_router_dtype)


def test_what_plain_layers_cannot_recompute_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(_refused_module, write_family(tmp_path, "qwen3")):
        assert "recompute_modules names 'layernorm'" in message


def _refused_module(_rank: int, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        build(folder, recompute="selective", recompute_modules=("layernorm",))
    return str(caught.value)
