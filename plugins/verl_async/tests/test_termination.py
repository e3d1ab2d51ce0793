"""SIGTERM as Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from verl_async.termination import sigterm_as_interrupt

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
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), sigterm_as_interrupt():
        asyncio.run(job())
    assert cancelled == [True]
    assert signal.getsignal(signal.SIGINT) is former
    assert signal.getsignal(signal.SIGTERM) is sigterm
