"""Check a plugin's config class: whatever it adds, a section must mean the same to the core for every plugin."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from verl_engine.contract.errors import HookError

if TYPE_CHECKING:
    from pydantic import BaseModel  # not for listing plugins

_RULES: Final = ("extra", "frozen", "validate_default", "allow_inf_nan")
"""Settings of pydantic on which the core relies."""
_MEANING: Final = ("annotation", "metadata", "default", "default_factory", "alias", "validation_alias")
"""What makes a field: all but its description."""


def check_config_class(config_class: type[BaseModel], base: type[BaseModel], key: str, name: str, label: str) -> None:
    """Refuse a class that hides or changes what the core's class, its base, has.

    The field `key` names the plugin: alone of the core's fields it may be narrowed, to that name.
    """
    faults = [*_settings(config_class, base), *_fields(config_class, base, key, name), *_hidden(config_class, base)]
    if faults:
        raise HookError(
            f"{label}: {config_class.__name__} may add to {base.__name__}, and override its methods, but "
            f"{'; '.join(faults)}; use other names, and refuse values in validators of your own"
        )


def _settings(config_class: type[BaseModel], base: type[BaseModel]) -> Iterator[str]:
    for rule in _RULES:
        ours, theirs = base.model_config.get(rule), config_class.model_config.get(rule)
        if theirs != ours:
            yield f"it sets {rule}={theirs!r} in place of {ours!r}"


def _fields(config_class: type[BaseModel], base: type[BaseModel], key: str, name: str) -> Iterator[str]:
    for field, ours in base.model_fields.items():
        theirs = config_class.model_fields.get(field)
        if theirs is None:
            yield f"it takes the field {field} away"
        elif field == key:
            is_one_of = get_origin(theirs.annotation) is Literal and name in get_args(theirs.annotation)
            if theirs.annotation is not str and not is_one_of:
                yield f"its field {field} does not take {name!r}"
        elif any(getattr(theirs, part) != getattr(ours, part) for part in _MEANING):
            yield f"it changes the field {field}"


def _hidden(config_class: type[BaseModel], base: type[BaseModel]) -> Iterator[str]:
    """Find what the core's class has, under names that are no fields, and the plugin's class has otherwise."""
    ours = {name for name in dir(base) if name not in base.model_fields and not name.startswith("__")}
    fields = {*config_class.model_fields, *config_class.model_computed_fields}
    for field in sorted(ours & fields):
        yield f"its field {field} hides {base.__name__}.{field}"
    for owner in config_class.__mro__[: config_class.__mro__.index(base)]:
        for name in sorted(ours & vars(owner).keys() - _PYDANTIC_S - fields):
            if name.startswith("_"):
                yield f"its {name} hides {base.__name__}.{name}, which would no longer be called"
            elif not _can_replace(getattr(config_class, name), getattr(base, name)):
                yield f"its {name} cannot be called as {base.__name__}.{name} is"


_PYDANTIC_S: Final = frozenset(
    {"_abc_impl", "model_config", "model_fields", "model_computed_fields", "model_post_init"}
)
"""Names that pydantic gives each class."""


def _can_replace(theirs: Any, ours: Any) -> bool:
    """Whether a method can be called as the one that it overrides, by position."""
    if not callable(theirs) or inspect.iscoroutinefunction(theirs):
        return False
    try:
        inspect.signature(theirs).bind(*inspect.signature(ours).parameters)
    except (TypeError, ValueError):
        return False
    return True
