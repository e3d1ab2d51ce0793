"""Turn pydantic's errors into one message that a user can act on."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from verl_engine.contract.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
_LONGEST_VALUE = 100
_WORDS = {
    "bool_type": "must be true or false",
    "path_type": "must be a text that names a file or folder",
    "tuple_type": "must be a list",
}
"""What pydantic says of Python's types, in YAML's."""


def validate(model_class: type[Model], data: Mapping[str, Any], at: str = "") -> Model:
    """Validate a section by its config class.

    Args:
        model_class: the pydantic model.
        data: plain values; a nested section may also be an already validated model.
        at: dotted path of the section in its file, such as ``engine``; put before every path in messages.
    Raises:
        ConfigError: lists every problem on a line of its own: path, value got, what is allowed.
    """
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        problems = _describe_all(model_class, data, at, error.errors(include_url=False))
        if len(problems) == 1:
            raise ConfigError(problems[0]) from error
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:{lines}") from error


class _Place(NamedTuple):
    """Where an error is, in the user's terms."""

    path: str
    """Dotted, without the names that pydantic adds for members of a union."""
    value: object
    section: str
    """Path of what holds it."""
    owners: list[type[BaseModel]]
    """Models that may stand there: they know which keys are allowed beside it."""
    own: list[type[BaseModel]]
    """Models that the value itself may be."""


def _describe_all(model_class: type[BaseModel], data: object, at: str, errors: list[ErrorDetails]) -> list[str]:
    """One line a path: what the members of a union each say of one value is joined."""
    complaints: dict[str, tuple[_Place, list[str]]] = {}
    for error in errors:
        place = _find(model_class, data, at, error)
        texts = complaints.setdefault(place.path, (place, []))[1]
        text = _describe(place, error)
        if text not in texts:
            texts.append(text)
    return [_line(place, texts) for place, texts in complaints.values()]


def _line(place: _Place, texts: list[str]) -> str:
    text = ", or ".join(texts)
    if not place.path:
        return text
    if text.startswith("is "):  # missing, or not a known key: there is no value worth showing
        return f"{place.path} {text}"
    if isinstance(place.value, Mapping | BaseModel):
        return f"{place.path}: {text}"
    return f"{place.path}={shown(place.value)}: {text}"


def shown(value: object) -> str:
    """Show a value in a message, or its beginning."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _find(model_class: type[BaseModel], data: object, at: str, error: ErrorDetails) -> _Place:
    place = _Place(at, data, at, [], [model_class])
    for index, part in enumerate(error["loc"]):
        is_missing_key = error["type"] == "missing" and index == len(error["loc"]) - 1 and isinstance(part, str)
        is_key = isinstance(place.value, Mapping) and part in place.value
        if is_missing_key or is_key:
            value = place.value[part] if isinstance(place.value, Mapping) and is_key else None
            fields = [owner.model_fields[str(part)] for owner in place.own if part in owner.model_fields]
            own = [model for field in fields for model in _models_in(field.annotation)]
            path = f"{place.path}.{part}" if place.path else str(part)
            place = _Place(path, value, place.path, place.own, own)
        elif isinstance(part, int):
            is_item = isinstance(place.value, Sequence) and part < len(place.value)
            value = place.value[part] if isinstance(place.value, Sequence) and is_item else None
            place = place._replace(path=f"{place.path}[{part}]", value=value)
        else:  # the name of a union's member
            place = place._replace(own=[model for model in place.own if model.__name__ == part] or place.own)
    return place


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Every model in an annotation, such as ``A`` and ``B`` in ``list[A | B] | None``."""
    if get_origin(annotation) is None:
        return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _describe(place: _Place, error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            is_item = isinstance(error["loc"][-1], int)
            return f"is missing{': the list is too short' if is_item else _meaning(place)}"
        case kind if kind in _WORDS:
            return _WORDS[kind]
        case "extra_forbidden":
            return _describe_unknown_key(place)
        case "model_type" | "model_attributes_type" | "dataclass_type":
            return f"must be a section{_keys(place.own)}"
        case _:
            text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            text = text.replace("Input should be", "must be").replace("Input should", "must")
            is_whole = error["type"] == "int_type" and isinstance(place.value, float) and place.value.is_integer()
            return f"{text}; write {place.value:.0f}" if is_whole else text


def _meaning(place: _Place) -> str:
    """The docstring of a missing field tells what to write."""
    name = place.path.rpartition(".")[2]
    for owner in place.owners:
        field = owner.model_fields.get(name)
        if field is not None and field.description:
            return f": {' '.join(field.description.replace('``', '`').split())}"
    return _keys(place.own)


def _describe_unknown_key(place: _Place) -> str:
    name = place.path.rpartition(".")[2]
    known = [key for owner in place.owners for key in owner.model_fields]
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"is not a known key; did you mean {place.section}{'.' if place.section else ''}{close[0]}?"
    return f"is not a known key{_keys(place.owners)}"


def _keys(models: list[type[BaseModel]]) -> str:
    names = dict.fromkeys(key for model in models for key in model.model_fields)
    return f"; keys there: {', '.join(names)}" if names else ""
