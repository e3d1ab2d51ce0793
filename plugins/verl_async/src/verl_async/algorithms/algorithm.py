"""What a job learns from rewards: its advantage and its loss, found and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.algorithms.columns import OLD_LOG_PROBS, REF_LOG_PROBS, columns_of_advantage, columns_of_loss
from verl_async.algorithms.job_loss import JobLoss, load_loss, require_call
from verl_async.algorithms.names import ADVANTAGES
from verl_async.references import load

if TYPE_CHECKING:
    from verl_async.algorithms.advantages import Advantage
    from verl_async.config import AlgorithmConfig, KlConfig


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The ``algorithm`` section with what it names."""

    config: AlgorithmConfig
    """With the settings of advantage and loss as their ``Config`` has them, defaults included."""
    advantage: Advantage
    advantage_columns: tuple[str, ...]
    """What the advantage reads, and what the KL in the reward does."""
    loss: JobLoss

    @classmethod
    def load(cls, config: AlgorithmConfig) -> Algorithm:
        """Import the advantage and the loss into this process, and validate their settings.

        Raises:
            ConfigError: one cannot be found, made or called, or a setting of it is wrong.
        """
        advantage = load(config.advantage, ADVANTAGES, config.advantage_config, "algorithm.advantage")
        place = f"algorithm.advantage={config.advantage}"
        require_call(advantage.made, ("group",), place)
        loss = load_loss(config.loss, config.loss_config)
        in_reward, in_loss = (_kl(config, where) for where in ("reward", "loss"))
        advantage_columns = columns_of_advantage(advantage.made, place)
        loss_columns = columns_of_loss(loss.made, f"algorithm.loss={config.loss}")
        return cls(
            config=config.model_copy(update={"advantage_config": advantage.settings, "loss_config": loss.settings}),
            advantage=advantage.made,
            advantage_columns=_joined(advantage_columns, (OLD_LOG_PROBS, REF_LOG_PROBS) if in_reward else ()),
            loss=JobLoss(
                name=config.loss,
                settings=json.dumps(loss.settings, sort_keys=True),
                path=loss.path,
                columns=_joined(loss_columns, (REF_LOG_PROBS,) if in_loss else ()),
                kl_estimator=in_loss.estimator if in_loss else None,
                kl_coefficient=in_loss.coefficient if in_loss else 0.0,
                entropy_coefficient=config.entropy_coefficient,
            ),
        )

    @property
    def reward_kl(self) -> KlConfig | None:
        """The KL that is taken off the rewards, if any."""
        return _kl(self.config, "reward")

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the log-probs of the reference policy."""
        return REF_LOG_PROBS in (*self.advantage_columns, *self.loss.columns)


def _kl(config: AlgorithmConfig, where: str) -> KlConfig | None:
    return config.kl if config.kl is not None and config.kl.where == where else None


def _joined(columns: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*columns, *more)))
