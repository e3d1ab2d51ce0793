"""Arguments that are one of a few texts: another text is an error, not the default."""

from typing import Any, get_args

from verl_engine.contract.errors import ConfigError, EngineError


def require_choice(
    what: str, value: object, choices: Any, *, or_else: str = "", error: type[EngineError] = ConfigError
) -> None:
    """Refuse what is not among the choices.

    Args:
        what: the argument's name, for the message.
        value: as it was given.
        choices: a ``Literal`` of texts.
        or_else: what else is allowed, for the message.
        error: raised.
    """
    known = get_args(choices)
    if value not in known:
        raise error(f"{what}={value!r} must be one of {', '.join(known)}{or_else}")
