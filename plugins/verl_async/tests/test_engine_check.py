"""Whether an engine gives what an algorithm needs."""

from __future__ import annotations

from typing import Any

import pytest

from plugins.verl_async.tests.fakes import train_job
from verl_async.algorithms.algorithm import Algorithm
from verl_async.algorithms.engine_check import check_engine
from verl_async.algorithms.reference_policy import reference_engine
from verl_async.config import AlgorithmConfig
from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.engine_config import EngineConfig, LoraConfig
from verl_engine.contract.errors import ConfigError, UnsupportedError

KL: dict[str, Any] = {"kl": {}}


def check(algorithm: dict[str, Any], gaps: dict[str, str] | None = None, **engine: Any) -> None:
    spec = BackendSpec("toy", EngineConfig, ("cpu",), Capabilities(gaps=gaps or {}))
    loaded = Algorithm.load(AlgorithmConfig.model_validate(algorithm))
    check_engine(loaded, EngineConfig(backend="toy", **engine), spec)


def test_a_reference_is_a_forward_only_engine_or_the_model_without_its_adapter() -> None:
    gaps = {"forward_only": "a toy"}
    check(KL)
    check(KL, gaps, lora=LoraConfig())
    check({}, gaps)
    with pytest.raises(
        UnsupportedError, match=r"needs a reference policy, .*cannot do 'forward_only': a toy; train an"
    ):
        check(KL, gaps)


def test_an_entropy_bonus_needs_the_gradient() -> None:
    check({"entropy_coefficient": 0.1}, entropy="gradient")
    check({}, entropy="value")
    with pytest.raises(
        ConfigError, match=r"entropy_coefficient=0\.1 needs .* engine\.entropy=value; set engine\.entro"
    ):
        check({"entropy_coefficient": 0.1}, entropy="value")
    with pytest.raises(ConfigError, match=r"engine\.entropy=gradient: neither"):
        check({}, entropy="gradient")


def test_the_engine_of_the_reference_is_the_jobs_without_training() -> None:
    job = train_job(algorithm=KL)
    reference = reference_engine(job)
    assert reference is not None
    assert reference == job.engine.model_copy(update={"forward_only": True})
    assert reference_engine(train_job()) is None
    assert reference_engine(job.model_copy(update={"engine": EngineConfig(backend="toy", lora=LoraConfig())})) is None


def test_an_engine_that_cannot_be_forward_only_as_set_is_named() -> None:
    class Picky(EngineConfig):
        def model_post_init(self, _: object) -> None:
            if self.forward_only:
                raise ValueError("offload is for training")

    job = train_job(algorithm=KL).model_copy(update={"engine": Picky(backend="toy")})
    with pytest.raises(
        ConfigError, match=r"is this engine with forward_only=true, and engine: offload is for training"
    ):
        reference_engine(job)
