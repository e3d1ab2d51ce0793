"""Weights in and out of models that are divided among ranks, against what their folders hold."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from plugins.verl_megatron_mindspeed.tests.engines import forget_groups
from verl_engine.contract.errors import ModelError, WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.weights.shards import assemble_weights, shard_of
from verl_engine.testing.tiny_models import tiny_config, write_tiny_critic
from verl_megatron_mindspeed.config import MegatronConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_engine.engine.base import WeightShard, WeightSpec
    from verl_engine.testing.rank_pool import RankPool
    from verl_megatron_mindspeed.model.build import MegatronModel
    from verl_megatron_mindspeed.weights.weight_map import WeightMap

VOCABULARY: Final = 33  # two ranks do not divide it
MODELS: Final[dict[str, tuple[type[Any], dict[str, Any]]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "experts": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "vpp": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
    "dp": {},
    "ep": {"expert_parallel_size": 2},
    "etp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "tp, ep": {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
CASES: Final = [
    ("llama", "tp"),
    ("qwen2", "tp"),
    ("qwen3", "tp"),
    ("tied", "tp"),
    ("qwen3", "pp"),
    ("tied", "pp"),
    ("qwen2", "vpp"),
    ("tied", "vpp"),
    ("qwen2", "dp"),
    ("experts", "ep"),
    ("experts", "etp"),
    ("experts", "tp, ep"),
    ("experts", "pp"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each model, with four layers and no two numbers alike."""
    root = tmp_path_factory.mktemp("models")
    for name, (config_class, settings) in MODELS.items():
        config = config_class(**{**tiny_config(VOCABULARY), "num_hidden_layers": 4, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
        model.save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def build(folder: Path, layout: str, **settings: Any) -> tuple[MegatronModel, WeightMap]:
    """Build a rank's part of a model, without reading weights."""
    from verl_megatron_mindspeed import parallel
    from verl_megatron_mindspeed.model.build import build_model
    from verl_megatron_mindspeed.weights.weight_map import WeightMap

    forget_groups()  # the tests' engines follow each other in one process, divided otherwise
    config = MegatronConfig(device="cpu", learning_rate=1e-3, **{**LAYOUTS[layout], **settings})
    groups = parallel.build_groups(config)
    device = Device.resolve("cpu", 0)
    parallel._exchange(groups.state)  # for good: there is no engine that would do it for each call
    model = build_model(config, folder, groups, device)
    return model, WeightMap(model, groups, device)


def load(folder: Path, layout: str, **settings: Any) -> tuple[MegatronModel, WeightMap]:
    """Build a rank's part of a model, and read its weights."""
    model, weights = build(folder, layout, **settings)
    with torch.no_grad():
        for parameter in _parameters(model):
            parameter.fill_(torch.nan)  # whatever is not read shows
    weights.load_folder(folder)
    return model, weights


def whole(weights: WeightMap) -> dict[str, torch.Tensor]:
    """Copy all weights."""
    return {name: tensor.clone() for name, tensor in weights.full_weights([spec.name for spec in weights.specs()])}


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare bit for bit."""
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not wrong


@pytest.mark.thinned(one_in=3)
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_is_read_is_what_comes_out_and_what_mbridge_exports(
    ranks: RankPool, folders: dict[str, Path], model: str, layout: str
) -> None:
    ranks.run(_there_and_back, folders[model], layout)


def _there_and_back(rank: int, folder: Path, layout: str) -> None:
    del rank
    model, weights = load(folder, layout)
    expected = load_file(folder / "model.safetensors")
    specs = weights.specs()
    assert {spec.name: spec.shape for spec in specs} == {name: tuple(t.shape) for name, t in expected.items()}
    require_equal(whole(weights), expected)
    require_equal(_exported_by_mbridge(model), expected)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, specs)
    assert everywhere[0] == everywhere[1]


def _exported_by_mbridge(model: MegatronModel) -> dict[str, torch.Tensor]:
    from verl_megatron_mindspeed.model.names import fused_name

    bridge = model.bridge
    has_experts = model.transformer.num_moe_experts is not None
    local_to_global = type(bridge)._weight_name_mapping_mcore_local_to_global

    def names(chunk: Any, **_: object) -> dict[str, str]:  # mbridge counts this rank's experts on by itself
        found = local_to_global(bridge, chunk, consider_ep=False)
        return {local: fused_name(name, experts=has_experts) for local, name in found.items()}

    bridge._weight_name_mapping_mcore_local_to_global = names
    bridge.make_vocab_size_divisible_by = 1
    bridge.vocab_size, bridge.padded_vocab_size = model.vocab_size, model.padded_vocab_size
    parts = [(name, parameter) for part in model.parts() for name, parameter in part.named_parameters()]
    for name, parameter in parts:  # mbridge goes by Megatron's marks
        is_column = any(layer in name for layer in ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1"))
        is_row = any(layer in name for layer in ("linear_proj", "linear_fc2"))
        parameter.tensor_model_parallel = is_column or is_row
        parameter.partition_dim = 1 if is_row else 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", lambda: "cpu")
        return {name: tensor.clone() for name, tensor in bridge.export_weights(model.parts())}


@pytest.mark.parametrize(("model", "layout"), [("tied", "pp"), ("qwen2", "tp"), ("experts", "tp, ep")])
def test_the_ranks_parts_are_full_weights_and_go_back_in(
    ranks: RankPool, folders: dict[str, Path], model: str, layout: str
) -> None:
    expected = load_file(folders[model] / "model.safetensors")
    found = ranks.run(_parts, folders[model], layout)
    specs: list[WeightSpec] = found[0][0]
    parts = [part for _, own in found for part in own]
    require_equal(dict(assemble_weights(specs, parts)), expected)
    assert all([part.name for part in own] == [spec.name for spec in specs] for _, own in found)


def _parts(rank: int, folder: Path, layout: str) -> tuple[list[WeightSpec], list[WeightShard]]:
    del rank
    model, weights = load(folder, layout)
    own = [dataclasses.replace(part, tensor=part.tensor.clone()) for part in weights.weight_shards()]
    before = _held(weights)
    everything = whole(weights)
    for comes_whole in (False, True):
        for parameter in _parameters(model):
            parameter.detach().zero_()
        if comes_whole:
            weights.load_full_weights(reversed(everything.items()))
        else:
            weights.load_weight_shards(reversed(own))
        pairs = zip(_held(weights), before, strict=True)
        assert all(torch.equal(after, expected) for after, expected in pairs)
    return weights.specs(), own


def _held(weights: WeightMap) -> list[torch.Tensor]:
    """Copy all that a rank holds, the copy of a tied output layer too."""
    parts = weights.tensor_shards(lambda parameter: parameter).values()
    return [part.clone() for held in parts for _, part in held.shards]


def _parameters(model: MegatronModel) -> list[torch.nn.Parameter]:
    return [parameter for chunk in model.chunks for parameter in chunk.parameters()]


def test_what_does_not_fit_is_refused(ranks: RankPool, folders: dict[str, Path]) -> None:
    ranks.run(_refusals, folders["qwen3"])


def _refusals(rank: int, folder: Path) -> None:
    del rank
    _, weights = load(folder, "pp")
    items = list(whole(weights).items())
    name, tensor = items[0]
    wrong_weights = {
        "unknown": [("no.such.weight", tensor), *items],
        "shape": [(name, tensor[1:]), *items[1:]],
        "missing": items[1:],
        "twice": [*items, items[0]],
    }
    for given in wrong_weights.values():
        with pytest.raises(WeightsError, match=r"does not fit|1 weights are missing"):
            weights.load_full_weights(iter(given))
    parts = [dataclasses.replace(part, tensor=part.tensor.clone()) for part in weights.weight_shards()]
    held = next(index for index, part in enumerate(parts) if part.tensor.numel())
    empty = next(index for index, part in enumerate(parts) if not part.tensor.numel())
    for index in (held, empty):
        one = parts[index]
        moved = dataclasses.replace(one, offsets=tuple(offset + 1 for offset in one.offsets))
        stranger = dataclasses.replace(one, name="no.such.weight")
        others = [*parts[:index], *parts[index + 1 :]]
        for given_parts in ([moved, *others], [stranger, *parts], others, [*parts, one]):
            with pytest.raises(WeightsError, match=r"does not fit|is not this rank's|1 weights are missing"):
                weights.load_weight_shards(iter(given_parts))
    with pytest.raises(WeightsError, match=r"no\.such\.weight was asked for"):
        next(weights.full_weights(["no.such.weight"]))


def test_what_several_ranks_hold_is_sent_once(ranks: RankPool, folders: dict[str, Path]) -> None:
    # With data parallelism one rank has everything: one broadcast a weight, straight into the whole.
    for layout, num_halves in (("dp", 0), ("tp", 4 * (3 + 2 + 2) + 2)):
        num_weights, sent = ranks.run(_broadcasts, folders["llama"], layout)[0]
        assert sent == num_weights + num_halves


def _broadcasts(rank: int, folder: Path, layout: str) -> tuple[int, int]:
    del rank
    _, weights = load(folder, layout)
    sent = []
    broadcast = dist.broadcast
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "broadcast", lambda *args, **kwargs: sent.append(broadcast(*args, **kwargs)))
        found = whole(weights)
    return len(found), len(sent)


@pytest.mark.parametrize(("model", "layout"), [("tied", "pp"), ("experts", "tp, ep"), ("qwen2", "tp")])
def test_flat_shards_of_an_optimizer_are_parts_of_weights_written_once(
    ranks: RankPool, folders: dict[str, Path], model: str, layout: str
) -> None:
    expected = load_file(folders[model] / "model.safetensors")
    written = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for found in ranks.run(_flat_parts, folders[model], layout):
        assert found.keys() == expected.keys()
        for name, parts in found.items():
            for offsets, part in parts:
                shard_of(written[name], offsets, part.shape).add_(part)
    require_equal(written, expected)


def _flat_parts(rank: int, folder: Path, layout: str) -> dict[str, list[tuple[tuple[int, ...], torch.Tensor]]]:
    """Return what is written of two flat shards of every parameter, as two data-parallel ranks would have them."""
    del rank
    _, weights = load(folder, layout)
    written: dict[str, list[Any]] = {spec.name: [] for spec in weights.specs()}
    for first in (True, False):

        def shard(parameter: torch.Tensor, *, first: bool = first) -> tuple[int, torch.Tensor]:
            cut = parameter.numel() // 3 + 1
            flat = parameter.detach().view(-1)
            return (0, flat[:cut]) if first else (cut, flat[cut:])

        for name, parts in weights.tensor_shards(shard).items():
            written[name] += [(offsets, part.clone()) for offsets, part in parts.shards if parts.is_written]
    return written


def test_a_folder_that_one_rank_cannot_read_is_refused_on_all(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    ranks.run(_one_cannot_read, folders["qwen2"])
    lacking = load_file(folders["qwen2"] / "model.safetensors")
    del lacking["model.layers.3.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((folders["qwen2"] / "config.json").read_bytes())
    save_file(lacking, tmp_path / "model.safetensors")
    ranks.run(_lacking, tmp_path)


def _one_cannot_read(rank: int, folder: Path) -> None:
    from verl_megatron_mindspeed.weights import folder as reader

    def fail(*_: object) -> None:
        raise OSError("no route to disk")

    _, weights = build(folder, "pp")
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(reader.WeightFolder, "read", fail)
        with pytest.raises(ModelError, match="rank 1 failed: OSError: no route to disk"):
            weights.load_folder(folder)


def _lacking(rank: int, folder: Path) -> None:
    del rank
    _, weights = build(folder, "pp")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight; it holds"):
        weights.load_folder(folder)


def test_a_new_head_stays_and_a_critics_own_is_read(ranks: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    critic = write_tiny_critic(tmp_path / "critic")
    for layout in ("tp", "pp"):
        found = ranks.run(_critic, folders["tied"], layout)[1]
        expected = load_file(folders["tied"] / "model.safetensors")
        assert found.keys() - expected.keys() == {"score.weight", "score.bias"}
        assert found["score.weight"].std() > 0
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        require_equal(ranks.run(_critic, critic, layout)[0], load_file(critic / "model.safetensors"))


def _critic(rank: int, folder: Path, layout: str) -> dict[str, torch.Tensor]:
    del rank
    _, weights = build(folder, layout, head="value")
    weights.load_folder(folder)
    return whole(weights)


@pytest.mark.fault(10, 12)
@pytest.mark.parametrize(("model", "layout"), [("tied", "pp"), ("experts", "ep")])
def test_transformers_loads_what_is_saved(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path, model: str, layout: str
) -> None:
    ranks.run(_save, folders[model], tmp_path / "saved", layout)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folders[model], dtype=torch.bfloat16)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert found.dtype == torch.bfloat16
    require_equal(found.state_dict(), expected.state_dict())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == [type(expected).__name__]
    own = json.loads((folders[model] / "config.json").read_text())
    assert {**config, "dtype": own["dtype"]} == own  # nothing else is changed in it
    assert (tmp_path / "saved" / "generation_config.json").read_bytes() == (
        folders[model] / "generation_config.json"
    ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


def _save(rank: int, folder: Path, target: Path, layout: str) -> None:
    del rank
    _, weights = load(folder, layout, param_dtype="bfloat16")
    for _ in range(2):  # the second time over the first
        weights.save_pretrained(target)


def test_float32_masters_of_a_bfloat16_model_are_read_unrounded(ranks: RankPool, folders: dict[str, Path]) -> None:
    expected = load_file(folders["qwen3"] / "model.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for parts in ranks.run(_masters, folders["qwen3"]):
        for name, own in parts.items():
            for offsets, part in own:
                shard_of(found[name], offsets, part.shape).copy_(part)
    require_equal(found, expected)


def _masters(rank: int, folder: Path) -> dict[str, Any]:
    del rank
    model, weights = load(folder, "tp", param_dtype="bfloat16")
    masters: dict[torch.Tensor, torch.Tensor] = {
        parameter: torch.zeros_like(parameter, dtype=torch.float32) for parameter in _parameters(model)
    }
    get: Callable[[torch.Tensor], torch.Tensor] = masters.__getitem__
    assert weights.read_folder_into(get) == set()
    return {name: list(parts.shards) for name, parts in weights.tensor_shards(get).items()}
