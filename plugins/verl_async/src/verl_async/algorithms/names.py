"""The built-in advantages and losses, as references."""

from typing import Final

ADVANTAGES: Final = {
    "grpo": "verl_async.algorithms.advantages:grpo",
    "dr_grpo": "verl_async.algorithms.advantages:dr_grpo",
}
LOSSES: Final = {"ppo": "verl_async.algorithms.policy_loss:PpoLoss"}
