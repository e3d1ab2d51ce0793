from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from verl_engine.contract.config_file import validate
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.strict_model import StrictModel


class Trainer(StrictModel):
    num_steps: int = Field(ge=1)
    """Training steps; each consumes
    one batch."""
    device: Literal["cpu", "cuda"] = "cpu"
    limit: int | Literal["auto"] = "auto"


class Evaluation(StrictModel):
    prompts: str
    temperature: float = 1.0


class Cached(StrictModel):
    folder: str


def _whole(value: object) -> object:
    if not isinstance(value, EngineConfig):
        raise ValueError("the engine section must be validated by its backend first")  # noqa: TRY004
    return value


class Job(StrictModel):
    engine: Annotated[SerializeAsAny[EngineConfig], BeforeValidator(_whole)]
    trainer: Trainer
    evaluation: Evaluation | None = None
    source: Evaluation | Cached | None = None
    several: tuple[Evaluation, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Job:
        if self.trainer.num_steps == 13:
            raise ValueError("trainer.num_steps=13 is unlucky; take 12")
        return self


class ToyConfig(EngineConfig):
    width: int = 4


def job(**sections: object) -> dict[str, Any]:
    engine = ToyConfig(backend="toy", learning_rate=0.1, width=8)
    return {"engine": engine, "trainer": {"num_steps": 2}, **sections}


def message_of(data: dict[str, Any], at: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        validate(Job, data, at)
    return str(caught.value)


def test_valid_data_gives_the_model_with_the_backends_own_config_inside() -> None:
    model = validate(Job, job(source={"folder": "x"}))
    assert isinstance(model.engine, ToyConfig)
    assert model.engine.width == 8
    assert model.source == Cached(folder="x")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"num_steps": 0}}, "trainer.num_steps=0: must be greater than or equal to 1"),
        ({"trainer": {"num_steps": "x"}}, "trainer.num_steps='x': must be a valid integer"),
        ({"trainer": {"num_steps": 1, "device": "gpu"}}, "trainer.device='gpu': must be 'cpu' or 'cuda'"),
        ({"trainer": {}}, "trainer.num_steps is missing: Training steps; each consumes one batch."),
        ({"trainer": {"num_steps": 13}}, "trainer.num_steps=13 is unlucky; take 12"),
        ({"trainer": 3}, "trainer=3: must be a section; keys there: num_steps, device, limit"),
        (
            {"trainer": {"num_steps": 1, "num_step": 3}},
            "trainer.num_step is not a known key; did you mean trainer.num_steps?",
        ),
        (
            {"trainer": {"num_steps": 1, "zzz": 3}},
            "trainer.zzz is not a known key; keys there: num_steps, device, limit",
        ),
        ({"trainr": {}}, "trainr is not a known key; did you mean trainer?"),
        (
            {"evaluation": {"prompts": "a", "temprature": 1}},
            "evaluation.temprature is not a known key; did you mean evaluation.temperature?",
        ),
        ({"evaluation": {}}, "evaluation.prompts is missing"),
        (
            {"several": [{"prompts": "a"}, {"prompts": "a", "prompt": "b"}]},
            "several[1].prompt is not a known key; did you mean several[1].prompts?",
        ),
        ({"engine": {"backend": "toy"}}, "engine: the engine section must be validated by its backend first"),
    ],
)
def test_one_problem_is_one_line(sections: dict[str, object], message: str) -> None:
    assert message_of(job(**sections)).startswith(message)
    assert "\n" not in message_of(job(**sections))


def test_a_union_of_scalars_is_one_line_without_its_members_names() -> None:
    message = message_of(job(trainer={"num_steps": 1, "limit": "most"}))
    assert message.startswith("trainer.limit='most': must be a valid integer")
    assert message.endswith(", or must be 'auto'")


def test_a_union_of_sections_names_keys_without_its_members_names() -> None:
    lines = message_of(job(source={"prompt": "x"})).splitlines()
    assert "  source.prompts is missing" in "\n".join(lines)
    assert "Evaluation" not in "\n".join(lines)
    assert any(line.startswith("  source.prompt is not a known key; did you mean source.prompts?") for line in lines)


def test_every_problem_has_its_line_under_the_sections_path() -> None:
    message = message_of(job(trainer={"num_steps": 0, "devise": "cpu"}, extra=1), at="jobs.first")
    assert message.splitlines() == [
        "3 problems in the configuration:",
        "  jobs.first.trainer.num_steps=0: must be greater than or equal to 1",
        "  jobs.first.trainer.devise is not a known key; did you mean jobs.first.trainer.device?",
        "  jobs.first.extra is not a known key; keys there: engine, trainer, evaluation, source, several",
    ]


def test_a_long_value_is_cut() -> None:
    assert len(message_of(job(trainer={"num_steps": "9" * 50 + "x" * 5000}))) < 300


def test_data_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine=3: must be a section; keys there: backend, device"):
        validate(EngineConfig, 3, at="engine")  # type: ignore[arg-type]


@pytest.mark.fault(22, 23)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_threads": True}, "engine.num_threads=True: must be a valid integer"),
        ({"num_threads": "1"}, "engine.num_threads='1': must be a valid integer"),
        ({"num_threads": 2.0}, "engine.num_threads=2.0: must be a valid integer; write 2"),
        ({"num_threads": 10**9}, "engine.num_threads=1000000000: must be less than or equal to 1024"),
        ({"seed": 10**29}, f"engine.seed={10**29}: must be less than or equal to {2**63 - 1}"),
        ({"lora": {"rank": 10**9}}, "engine.lora.rank=1000000000: must be less than or equal to 65536"),
        ({"learning_rate": "1e-6"}, "engine.learning_rate='1e-6': must be a valid number"),
        ({"learning_rate": True}, "engine.learning_rate=True: must be a valid number"),
        ({"eps": 1e-300}, "engine.eps=1e-300: must be between 1e-37 and 1e+37, which float32 can hold"),
        ({"forward_only": 1}, "engine.forward_only=1: must be true or false"),
        ({"forward_only": "yes"}, "engine.forward_only='yes': must be true or false"),
        ({"betas": [True, 0.9]}, "engine.betas[0]=True: must be a valid number"),
        ({"backend": 3}, "engine.backend=3: must be a valid string"),
    ],
)
def test_no_scalar_is_turned_into_another_and_numbers_have_bounds(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(EngineConfig, {"backend": "toy", **fields}, at="engine")
    assert str(caught.value) == message


class Named(StrictModel):
    """Its fields have the names of keys of pydantic's schemas."""

    type: int = 1
    default: tuple[int, ...] = ()
    metadata: dict[str, float | bool] = Field(default_factory=dict)
    serialization: int | None = None


@pytest.mark.fault(23)
@pytest.mark.parametrize(
    "fields", [{"type": "1"}, {"default": [True]}, {"metadata": {"a": "1"}}, {"serialization": 1.0}, {"type": True}]
)
def test_scalars_are_strict_wherever_they_are(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        validate(Named, fields)
    assert validate(Named, {"type": 2, "default": [3], "metadata": {"a": 1, "b": True}}).default == (3,)


def test_an_integer_may_stand_for_a_number_and_a_list_for_a_tuple() -> None:
    config = validate(EngineConfig, {"backend": "toy", "learning_rate": 1, "observers": ["timing"]})
    assert (config.learning_rate, config.observers) == (1.0, ("timing",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"betas": [0.9]}, "engine.betas[1] is missing: the list is too short"),
        ({"betas": 0.9}, "engine.betas=0.9: must be a list"),
        ({"forward_only": 2}, "engine.forward_only=2: must be true or false"),
        ({"lora": {"target_modules": "q_proj"}}, "engine.lora.target_modules='q_proj': must be a list"),
    ],
)
def test_types_have_the_names_that_yaml_gives_them(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(EngineConfig, {"backend": "toy", **fields}, at="engine")
    assert str(caught.value) == message
