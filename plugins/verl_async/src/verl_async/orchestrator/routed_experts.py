"""The experts of a trajectory's tokens, out of what its generations say.

Shapes: L tokens of prompt and trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl_async.errors import WorkflowError

if TYPE_CHECKING:
    import numpy.typing as npt

    from verl_async.orchestrator.workflow import Trajectory


def experts_of_trajectory(num_prompt: int, trajectory: Trajectory, sample: str) -> npt.NDArray[Any]:
    """Join what the generations of a trajectory say, each from the end of the one before on.

    Args:
        num_prompt: tokens of the prompt.
        trajectory: its generations with experts.
        sample: names it, for messages.
    Returns:
        [L, layers with experts, experts per token], of the generations' dtype. Each token has what was said of it
        first. Those behind all that the model read, so at least the last, repeat what is in front of them: nothing
        that is learnt depends on their experts.
    Raises:
        WorkflowError: the generations do not say it of every token that the model read.
    """
    end = num_prompt
    parts: list[npt.NDArray[Any]] = []
    num_known = 0
    for turn in trajectory.turns:
        end += len(turn) if isinstance(turn, tuple) else len(turn.token_ids)
        if isinstance(turn, tuple) or not turn.token_ids:
            continue
        found = turn.routed_experts
        first = end - 1 - (0 if found is None else len(found))
        if found is None or not 0 <= first <= num_known:
            raise WorkflowError(
                f"engine.router_replay=true: sample {sample}: its generations say the experts of {num_known} tokens "
                f"from the first on, and then of tokens {max(0, first)} to {end - 1}; a workflow must return what "
                "client.generate gave, each behind the tokens that it was given, and with goes_on each turn of the "
                "model as a Generation"
            )
        parts.append(found[num_known - first :])
        num_known = end - 1
    end = num_prompt + len(trajectory.token_ids)
    return np.concatenate([*parts, np.repeat(parts[-1][-1:], end - num_known, axis=0)])
