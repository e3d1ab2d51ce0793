"""Why both sides of a job were idle, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.config import AsyncTrainingConfig

_WORTH_SAYING: Final = 0.15
"""Of the time, on both sides: one of them always waits for the other."""


def idle_note(
    trainer: float, rollouter: float, waited_s: Mapping[str, float], config: AsyncTrainingConfig
) -> str | None:
    """Say what held both sides up, or return None where at most one waited.

    Args:
        trainer: its idle ratio.
        rollouter: that of the workers.
        waited_s: of the dispatcher; see `Dispatcher.waited_s`.
        config: of the job.
    """
    if min(trainer, rollouter) < _WORTH_SAYING:
        return None
    heading = f"the trainer was idle for {trainer:.0%} of the time and the rollout workers for {rollouter:.0%}"
    reason = max(waited_s, key=lambda name: waited_s[name])
    why = {
        "staleness": (
            "no further prompt could start before the next weight sync, and the trainer waited for the last samples of "
            f"a step; raise async_training.staleness_threshold ({config.staleness_threshold:g}) or "
            f"trigger_parameter_sync_step ({config.trigger_parameter_sync_step})"
        ),
        "queue": (f"the sample queue was full; raise async_training.queue_size ({config.queue_size}), or leave it out"),
        "room": (
            "the workers were full, and then waited for weight syncs or rewards; see the timeline in report.html, and "
            "raise reward.num_processes where scoring takes long"
        ),
    }[reason]
    return f"{heading}: {why}"
