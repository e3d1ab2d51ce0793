"""The learning-rate schedule, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.lr_schedule import lr_multiplier


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"backend": "toy", "learning_rate": 1.0, **settings})


def rates(steps: int, **settings: Any) -> list[float]:
    return [lr_multiplier(config(**settings), step) for step in range(steps)]


def test_constant() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_starts_above_zero_and_reaches_the_peak() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear() -> None:
    found = rates(8, lr_schedule="linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    found = rates(6, lr_schedule="cosine", total_steps=4)
    assert found == pytest.approx([1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0.0, 0.0])


def test_wsd_stays_then_falls_over_the_last_steps() -> None:
    # Warm-up 2, stable until step 6, then down by a quarter of 1 - 0.2 each.
    found = rates(12, lr_schedule="wsd", warmup_steps=2, total_steps=10, decay_steps=4, min_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_wsd_falls_over_the_last_tenth_by_default() -> None:
    found = rates(21, lr_schedule="wsd", total_steps=20)
    assert found == pytest.approx([1.0] * 19 + [0.5, 0.0])
    assert rates(5, lr_schedule="wsd", total_steps=3) == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.0])
    # Less than a tenth is left after the warm-up.
    assert rates(21, lr_schedule="wsd", total_steps=20, warmup_steps=19)[18:] == pytest.approx([1.0, 1.0, 0.0])


def test_wsd_refuses_phases_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="decay_steps=4 and warmup_steps=3 together must not exceed total_steps=6"):
        config(lr_schedule="wsd", warmup_steps=3, decay_steps=4, total_steps=6)
    assert config(lr_schedule="wsd", warmup_steps=2, decay_steps=4, total_steps=6).decay_steps == 4
    with pytest.raises(ValueError, match="decay_steps=4 is for lr_schedule=wsd, and it is cosine"):
        config(lr_schedule="cosine", decay_steps=4, total_steps=6)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_falling_schedule_needs_its_length(schedule: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.lr_schedule={schedule} needs engine.total_steps"):
        rates(1, lr_schedule=schedule)


def test_an_end_for_a_rate_that_does_not_fall_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_lr_ratio=0\.1 is where .* lr_schedule=constant does not fall"):
        config(min_lr_ratio=0.1)


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    warmup=st.integers(0, 5),
    length=st.integers(1, 9),
    least=st.floats(0, 1),
)
def test_it_rises_then_falls_within_its_bounds(schedule: str, warmup: int, length: int, least: float) -> None:
    found = rates(
        warmup + length + 3,
        lr_schedule=schedule,
        warmup_steps=warmup,
        total_steps=warmup + length,
        min_lr_ratio=0.0 if schedule == "constant" else least,
    )
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert found[warmup] == 1.0
    assert falling[-1] == pytest.approx(1.0 if schedule == "constant" else least)
    assert all(0 <= rate <= 1 for rate in found)
