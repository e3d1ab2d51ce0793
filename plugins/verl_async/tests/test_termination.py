"""SIGTERM and SIGHUP as Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from verl_async.termination import only_ctrl_c_interrupts, signals_as_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def former(request: pytest.FixtureRequest) -> Iterator[object]:
    """What SIGINT did before; a script that starts a job with `&` has it ignored."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_sigterm_cancels_what_asyncio_runs(former: object) -> None:
    cancelled = []

    async def job() -> None:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(5.0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    sigterm = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals_as_interrupt(), signals_as_interrupt():
        asyncio.run(job())
    assert cancelled == [True]
    assert signal.getsignal(signal.SIGINT) is former
    assert signal.getsignal(signal.SIGTERM) is sigterm


@pytest.mark.fault(14)
def test_only_the_first_of_several_signals_interrupts() -> None:
    """A lost terminal sends SIGHUP twice; what a job saves at the first must not be cut off by the second."""
    saved = []

    async def job() -> None:
        signal.raise_signal(signal.SIGHUP)
        try:
            await asyncio.sleep(5.0)
        except asyncio.CancelledError:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)
            saved.append(True)
            raise

    with pytest.raises(KeyboardInterrupt), signals_as_interrupt():
        asyncio.run(job())
    assert saved == [True]


@pytest.mark.fault(14)
def test_no_other_signal_cuts_off_what_ctrl_c_began() -> None:
    with signals_as_interrupt(), only_ctrl_c_interrupts():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.fault(14)
def test_under_nohup_a_lost_terminal_ends_nothing() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
