"""What the section takes and refuses, and what the library is given; without torch and without the library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_fsdp_turbo.config import FsdpTurboConfig
from verl_fsdp_turbo.patterns import matches

ATTENTION = "transformers.models.qwen3.modeling_qwen3.eager_attention_forward"
ULYSSES: dict[str, Any] = {
    "ulysses_parallel_size": 2,
    "cp_plan": {"ulysses_function_patches": [{"target_functions": [ATTENTION], "type": "full_attention"}]},
}
EXPERTS: dict[str, Any] = {
    "expert_parallel_size": 2,
    "ep_plan": {"apply_modules": ["model.layers.{*}.mlp.experts"]},
}


def config(**settings: Any) -> FsdpTurboConfig:
    return validate(FsdpTurboConfig, {"backend": "fsdp_turbo", "learning_rate": 1e-6, **settings}, at="engine")


def given(num_ranks: int = 8, **settings: Any) -> dict[str, Any]:
    return config(**settings).resolved_framework_config(num_ranks)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a key that the library would drop": (
        {"fsdp_plan": {"param_type": "bf16"}},
        r"engine\.fsdp_plan\.param_type is not",
    ),
    "a text that the library would take for true": ({"memory": {"recompute": "maybe"}}, "must be true or false"),
    "tensor parallelism": ({"tensor_parallel_size": 2}, "gradients are never averaged"),
    "the other way to split sequences": ({"kv_allgather_parallel_size": 2}, "not proven"),
    "modules outside FSDP": ({"fsdp_plan": {"ignored_modules": ["lm_head"]}}, "never averages the gradients"),
    "hooks that nobody calls": ({"fsdp_plan": {"hook_modules": ["model.layers.{*}"]}}, "has no effect where PyTorch"),
    "no modules to shard": ({"fsdp_plan": {"apply_modules": {}}}, "should have at least 1|at least 1 item"),
    "a dtype of the plan": ({"fsdp_plan": {"param_dtype": "bf16"}}, r"engine\.param_dtype decides it"),
    "offloading by the plan": (
        {"fsdp_plan": {"cpu_offload": True}},
        r"engine\.offload_policy and engine",
    ),
    "a divisor of one's own": ({"fsdp_plan": {"gradient_divide_factor": 2}}, "the number of all ranks"),
    "the library's own sharding": ({"fsdp_plan": {"fsdp_implementation": "custom"}}, "cannot be found"),
    "a divisor for experts": (EXPERTS | {"ep_plan": {"gradient_divide_factor": 1}}, "too large by the number of ranks"),
    "expert FSDP around routers": (EXPERTS | {"ep_plan": {"apply_efsdp_modules": ["*.mlp"]}}, "the router is then not"),
    "experts outside FSDP": (EXPERTS | {"ep_plan": {"dispatcher": "moonep"}}, "outside FSDP"),
    "experts that are not named": ({"expert_parallel_size": 2}, r"needs ep_plan\.apply_modules"),
    "a plan for experts that are not divided": ({"ep_plan": EXPERTS["ep_plan"]}, "for expert_parallel_size of 2"),
    "adapters beside divided experts": (EXPERTS | {"lora": {"rank": 2}}, "not proven"),
    "tokens split twice": (ULYSSES | {"sequence_parallel_size": 2}, "split twice"),
    "Ulysses without patches": ({"ulysses_parallel_size": 2}, "no attention sees the tokens of other ranks"),
    "patches without Ulysses": ({"cp_plan": ULYSSES["cp_plan"]}, "for ulysses_parallel_size of 2 or more"),
    "the wrapper with wrong log-probs": (
        ULYSSES | {"cp_plan": {"ulysses_core_attention_function": ATTENTION}},
        "log-probs are silently wrong",
    ),
    "layers whose masks are not made": (
        ULYSSES
        | {
            "cp_plan": {
                "ulysses_function_patches": [
                    {"target_functions": [ATTENTION], "type": "compressor_full_attention_transposed"}
                ]
            }
        },
        "take masks of their own",
    ),
    "packed rows for the model to split": (
        ULYSSES | {"cp_plan": ULYSSES["cp_plan"] | {"tokens_split_by": "model"}},
        "takes whole padded sequences",
    ),
    "rows cut out of packed ones": (
        {"memory": {"chunk_batch": {"apply_modules": ["*"], "chunk_arg_indexs": [0]}}},
        "are one",
    ),
    "a part of nothing": ({"packing": False, "memory": {"chunk_batch": {"apply_modules": ["*"]}}}, "are both empty"),
    "layers to recompute that are not": ({"memory": {"recompute_plan": ["*"]}}, "for recompute=true"),
    "a pattern with odd braces": ({"memory": {"recompute": True, "recompute_plan": ["layers.{x}"]}}, r"\{x\}"),
    "a patch of no dotted path": (
        {"module_patches": [{"target": "a:b", "replacement": "c.d"}]},
        "must be a dotted path",
    ),
}


@pytest.mark.fault(35)
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_reason(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fully_shard_parallel_size": 3}, r"engine\.fully_shard_parallel_size=3 does not divide the 8 ranks"),
        (ULYSSES | {"ulysses_parallel_size": 3}, r"engine\.ulysses_parallel_size=3 does not divide"),
        (EXPERTS | {"expert_parallel_size": 4, "expert_fully_shard_parallel_size": 4}, r"=16 does not divide"),
    ],
)
def test_sizes_must_divide_the_ranks(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(8, **settings)


def test_the_divisor_is_said_outright_so_that_world_size_need_not_be_set() -> None:
    plan = given(8, fully_shard_parallel_size=4)["distributed"]["fsdp_plan"]
    assert plan["gradient_divide_factor"] == 8.0
    assert plan["ignored_modules"] == []
    assert plan["apply_modules"] == {"<each decoder layer of the model>": {}}


def test_experts_divide_by_all_ranks_and_only_they_get_expert_fsdp() -> None:
    sizes = given(8, **EXPERTS)["distributed"]
    assert sizes["ep_plan"]["gradient_divide_factor"] == 8.0
    assert sizes["ep_plan"]["apply_efsdp_modules"] == sizes["ep_plan"]["apply_modules"]


@pytest.mark.parametrize("settings", [{"offload_policy": True}, {"forward_only": True}])
def test_offload_policy_and_forward_only_both_reach_the_library(settings: dict[str, Any]) -> None:
    plan = given(**settings)["distributed"]["fsdp_plan"]
    assert plan["cpu_offload"] is True
    assert plan["pin_memory"] is True
    assert given(device="cpu", **settings)["distributed"]["fsdp_plan"]["pin_memory"] is False
    assert given()["distributed"]["fsdp_plan"]["cpu_offload"] is False


def test_every_setting_reaches_the_library() -> None:
    told = given(
        param_dtype="bfloat16",
        packing=False,
        fsdp_plan={
            "apply_modules": {"model.layers.{0-3}": {"reshard_after_forward": False}, "lm_head": {}},
            "num_to_forward_prefetch": 1,
            "num_to_backward_prefetch": 2,
        },
        memory={
            "recompute": True,
            "recompute_plan": ["model.layers.{*}"],
            "chunk_batch": {"apply_modules": ["*.mlp"], "chunk_arg_indexs": [0], "chunk_mbs": 2},
        },
        module_patches=[{"target": "a.b", "replacement": "c.d"}],
    )
    plan = told["distributed"]["fsdp_plan"]
    assert plan["apply_modules"] == {"model.layers.{0-3}": {"reshard_after_forward": False}, "lm_head": {}}
    assert (plan["param_dtype"], plan["reduce_dtype"], plan["output_dtype"]) == ("bf16", "fp32", None)
    assert (plan["num_to_forward_prefetch"], plan["num_to_backward_prefetch"]) == (1, 2)
    assert told["memory"]["recompute_plan"] == ["model.layers.{*}"]
    assert told["memory"]["chunk_batch_plan"]["chunk_mbs"] == 2
    assert told["module_patches"] == [{"target": "a.b", "replacement": "c.d"}]


@pytest.mark.parametrize("text", ["false", "no", "off"])
def test_a_text_for_false_is_refused_and_not_the_library_s_truth(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.memory\.recompute='{text}': must be true or false"):
        given(offload_policy=False, memory={"recompute": text})


def test_neighbours_that_split_a_sequence_share_data() -> None:
    assert config(**ULYSSES).data_parallel_ranks(4) == (0, 0, 1, 1)
    assert config(sequence_parallel_size=4).data_parallel_ranks(8) == (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("model.layers.{*}", "model.layers.11", True),
        ("model.layers.{*}", "model.layers.1.mlp", False),
        ("model.layers.{2-11}", "model.layers.11", True),
        ("model.layers.{2-10}", "model.layers.11", False),
        ("*.mlp", "model.layers.1.mlp", True),
        ("model.layers", "modelxlayers", False),
    ],
)
def test_patterns_mean_what_they_mean_to_the_library(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_a_config_is_resolved_without_torch_and_without_the_library() -> None:
    program = (
        "import sys; from verl_fsdp_turbo.hooks import SPEC; "
        "SPEC.config_class(backend='fsdp_turbo').resolved_framework_config(8); "
        "print([name for name in ('torch', 'transformers', 'fsdp_turbo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
