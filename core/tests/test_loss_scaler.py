"""The dynamic loss scale, worked out by hand."""

from __future__ import annotations

from verl_engine.engine.loss_scaler import GROWTH_INTERVAL, LEAST, MOST, LossScaler


def test_an_overflow_halves_the_scale_and_says_so() -> None:
    scaler = LossScaler()
    assert scaler.scale == 65536.0
    assert scaler.update(is_finite=False)
    assert scaler.scale == 32768.0
    assert not scaler.update(is_finite=True)
    assert scaler.scale == 32768.0


def test_the_scale_doubles_after_two_thousand_finite_steps_in_a_row() -> None:
    scaler = LossScaler()
    for _ in range(1999):
        scaler.update(is_finite=True)
    assert scaler.scale == 65536.0
    scaler.update(is_finite=True)
    assert scaler.scale == 131072.0
    for _ in range(1999):
        scaler.update(is_finite=True)
    scaler.update(is_finite=False)  # the count begins anew
    for _ in range(1999):
        scaler.update(is_finite=True)
    assert scaler.scale == 65536.0
    scaler.update(is_finite=True)
    assert scaler.scale == 131072.0


def test_the_scale_has_bounds_and_at_the_least_an_overflow_is_a_real_one() -> None:
    scaler = LossScaler()
    assert [scaler.update(is_finite=False) for _ in range(18)] == [True] * 16 + [False] * 2
    assert scaler.scale == LEAST == 1.0
    for _ in range(40 * GROWTH_INTERVAL):
        scaler.update(is_finite=True)
    assert scaler.scale == MOST


def test_a_resumed_scaler_goes_on_as_the_first() -> None:
    first, second = LossScaler(), LossScaler()
    first.update(is_finite=False)
    for _ in range(1999):
        first.update(is_finite=True)
    second.load_state_dict(first.state_dict())
    for scaler in (first, second):
        scaler.update(is_finite=True)
        assert scaler.scale == 65536.0
