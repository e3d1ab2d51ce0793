"""What is known of each token of a response, besides the token: what an advantage or a loss may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found", bound="Callable[..., Any]")

ADVANTAGES: Final = "advantages"
"""What the advantage made of the rewards."""
REWARDS: Final = "rewards"
"""The sample's reward, the same for each of its tokens."""
ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"
"""Nats, of the policy that drew the token."""
OLD_LOG_PROBS: Final = "old_log_probs"
"""Nats, of the policy that ``algorithm.old_log_probs`` chooses."""
REF_LOG_PROBS: Final = "ref_log_probs"
"""Nats, of the reference policy: the model that training began with."""
REWARD_METRIC: Final = "reward/"
"""Begins the name of a number that the reward returned beside the score, such as ``reward/format``."""

_OF_ADVANTAGES: Final = (ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, REF_LOG_PROBS)
_OF_LOSSES: Final = (ADVANTAGES, REWARDS, *_OF_ADVANTAGES)


def with_columns(*names: str) -> Callable[[Found], Found]:
    """Say which columns a loss or an advantage reads; a class may also have an attribute ``columns``.

    Args:
        names: those of this module, or ``reward/KEY``.
    """

    def set_columns(found: Found) -> Found:
        found.columns = names  # type: ignore[attr-defined]
        return found

    return set_columns


def columns_of_loss(loss: object, place: str) -> tuple[str, ...]:
    """Return what a loss reads; by default `ADVANTAGES` and `OLD_LOG_PROBS`.

    Raises:
        ConfigError: there is no such column.
    """
    return _columns(loss, (ADVANTAGES, OLD_LOG_PROBS), _OF_LOSSES, place)


def columns_of_advantage(advantage: object, place: str) -> tuple[str, ...]:
    """Return what an advantage reads besides the rewards; by default nothing. Raises as `columns_of_loss`."""
    return _columns(advantage, (), _OF_ADVANTAGES, place)


def _columns(found: object, default: tuple[str, ...], known: tuple[str, ...], place: str) -> tuple[str, ...]:
    names = tuple(getattr(found, "columns", default))
    for name in names:
        if name not in known and not (isinstance(name, str) and name.removeprefix(REWARD_METRIC) not in {name, ""}):
            raise ConfigError(
                f"{place}: asks for the column {name!r}; there are {', '.join(known)} and {REWARD_METRIC}KEY for a "
                "number that the reward returns under KEY"
            )
    return tuple(dict.fromkeys(names))
