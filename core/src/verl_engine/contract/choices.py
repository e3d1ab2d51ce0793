"""Arguments that are one of a few texts: another text is an error, not the default."""

from typing import Any, get_args

from verl_engine.contract.errors import ConfigError, EngineError


def require_choice(
    what: str, value: object, choices: Any, *, or_else: str = "", error: type[EngineError] = ConfigError
) -> None:
    """Refuse a value that is not in a ``Literal`` of texts.

    The message calls it `what`, and adds `or_else` to what is allowed.
    """
    known = get_args(choices)
    if value not in known:
        raise error(f"{what}={value!r} must be one of {', '.join(known)}{or_else}")
