"""The ``engine`` section of the backend megatron: what does not go together is refused, and how ranks are divided."""

from __future__ import annotations

import re
from typing import Any

import pytest

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.mindspeed_config import DERIVED_KEYS


def new_config(**fields: Any) -> MegatronConfig:
    return validate(MegatronConfig, {"backend": "megatron", "device": "cpu", **fields}, at="engine")


TP2 = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"virtual_pipeline_parallel_size": 2}, "virtual_pipeline_parallel_size=2 needs pipeline_parallel_size of 2"),
        ({**TP2, "expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size=1 may differ .*=2 with"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2 may differ .*=1 with"),
        ({"sequence_parallel": True}, "sequence_parallel=true needs tensor_parallel_size of 2"),
        ({"overlap_param_gather": True}, "needs distributed_optimizer=true and overlap_grad_reduce=true"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "distributed_optimizer": False},
            "needs distributed_optimizer=true and overlap_grad_reduce=true",
        ),
        ({"recompute_method": "block"}, "recompute_method=block is for recompute=full, and it is off"),
        ({"recompute": "selective", "recompute_method": "block"}, "recompute_method=block is for recompute=full"),
        ({"recompute": "selective", "recompute_num_layers": 2}, "recompute_num_layers=2 is for recompute=full"),
        ({"recompute": "full", "recompute_modules": ["mlp"]}, r"recompute_modules=\('mlp',\) is for recompute=selec"),
        ({"transformer": "transformer_engine"}, "does not run on device=cpu; use auto or local"),
        ({"mindspeed": {"batch_invariant_ops": True}}, "mindspeed is for device=npu, and it is cpu"),
        ({"param_dtype": "float64"}, "param_dtype"),
        ({"recompute": "some"}, "recompute"),
        ({"tensor_paralel_size": 2}, "tensor_paralel_size"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        new_config(**fields)


@pytest.mark.parametrize("name", [name for name in MegatronConfig.model_fields if name.endswith("_parallel_size")])
def test_a_size_is_one_or_more(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{name}"):
        new_config(**{name: 0})


@pytest.mark.parametrize("option", DERIVED_KEYS)
def test_an_option_that_a_field_decides_is_refused_with_its_name(option: str) -> None:
    reason = re.escape(DERIVED_KEYS[option])
    with pytest.raises(ConfigError, match=f"transformer_options sets {option}, which is decided by {reason}"):
        new_config(transformer_options={option: 1})


def test_fields_that_decide_options_are_there() -> None:
    fields = {reason.split(",")[0].split(".")[1] for reason in DERIVED_KEYS.values() if reason.startswith("engine.")}
    assert fields <= MegatronConfig.model_fields.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
        {**TP2, "expert_tensor_parallel_size": 1, "expert_parallel_size": 2},
        {**TP2, "expert_tensor_parallel_size": 2},
        {**TP2, "sequence_parallel": True},
        {"overlap_param_gather": True, "overlap_grad_reduce": True},
        {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute": "selective", "recompute_modules": ["mlp"]},
    ],
)
def test_what_goes_together_is_taken(fields: dict[str, Any]) -> None:
    new_config(**fields)


def test_experts_are_split_as_the_rest_unless_it_is_said() -> None:
    assert new_config(**TP2).expert_tensor_ranks == 2
    assert new_config(**TP2, expert_parallel_size=2, expert_tensor_parallel_size=1).expert_tensor_ranks == 1


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (4, {}, (0, 1, 2, 3)),
        (4, {"tensor_parallel_size": 2}, (0, 0, 1, 1)),
        (4, {"context_parallel_size": 2}, (0, 0, 1, 1)),
        # Stages lie furthest apart: ranks 0 and 2 are a pipeline, 1 and 3 another.
        (4, {"pipeline_parallel_size": 2}, (0, 1, 0, 1)),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, (0, 0, 0, 0)),
        # The first stage is ranks 0 to 7: TP pairs (0, 1) and (2, 3) split the sequences of data rank 0.
        (
            16,
            {"tensor_parallel_size": 2, "context_parallel_size": 2, "pipeline_parallel_size": 2},
            (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1),
        ),
        # Ranks that divide experts each have tokens of their own.
        (4, {"expert_parallel_size": 4}, (0, 1, 2, 3)),
        (1, {}, (0,)),
    ],
)
def test_ranks_that_split_a_model_share_data(world_size: int, sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    config = new_config(**sizes)
    config.validate_world(world_size)
    assert config.data_parallel_ranks(world_size) == expected


@pytest.mark.parametrize(
    ("world_size", "sizes", "words"),
    [
        (2, {"tensor_parallel_size": 4}, r"= 4 \* 1 \* 1 = 4 does not divide the 2 ranks"),
        (
            12,
            {"tensor_parallel_size": 2, "context_parallel_size": 2, "pipeline_parallel_size": 2},
            r"engine\.tensor_parallel_size \* context_parallel_size \* pipeline_parallel_size = 2 \* 2 \* 2 = 8 does",
        ),
        (
            4,
            {"expert_parallel_size": 3},
            r"engine\.expert_tensor_parallel_size \* .* = 1 \* 3 \* 1 = 3 does not divide",
        ),
        (4, {"expert_parallel_size": 4, "tensor_parallel_size": 2}, r"= 2 \* 4 \* 1 = 8 does not divide the 4 ranks"),
    ],
)
def test_a_world_that_does_not_divide_so_is_refused(world_size: int, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        new_config(**sizes).validate_world(world_size)


def test_experts_may_be_divided_over_ranks_that_split_the_rest() -> None:
    new_config(tensor_parallel_size=2, expert_parallel_size=4, expert_tensor_parallel_size=1).validate_world(4)
