"""The base of every config section."""

import os
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema


def _make_first_model() -> None:
    """Make sure that models can be made, whatever else is installed.

    With the first one pydantic looks for plugins of its own, and so reads the entry points of every distribution. One
    with metadata that cannot be read would end every command of ours; then pydantic does without plugins.
    """
    try:
        create_model("First")
    except Exception:  # noqa: BLE001 - broken metadata raises anything
        os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"


_make_first_model()


_STRICT: Final = {"bool", "int", "float"}
_NO_SCHEMAS: Final = {"default", "metadata", "serialization"}
"""Parts of a schema that hold no other schema of what is read."""


def _make_strict(part: Any) -> None:
    if isinstance(part, dict):
        is_schema = isinstance(part.get("type"), str)  # and not schemas by the names of fields, one of them "type"
        if is_schema and part["type"] in _STRICT:
            part["strict"] = True
        for key, inner in part.items():
            if not is_schema or key not in _NO_SCHEMAS:
                _make_strict(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            _make_strict(inner)


STRICT: Final = ConfigDict(
    extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
)
"""Unknown keys are refused; field docstrings become descriptions."""


def strict_schema(_: type[BaseModel], source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Make scalars strict, wherever in a field's type they are; pydantic's ``strict`` refuses lists for tuples."""
    schema = handler(source)
    _make_strict(schema)
    return schema


class StrictModel(BaseModel):
    """Frozen; unknown keys and wrong types are refused; field docstrings become descriptions.

    No scalar is turned into another: ``true`` is no integer, ``"1"`` and ``1.0`` neither. An integer may stand for a
    float, a list for a tuple and a text for a path, since YAML has no other way to write them.
    """

    model_config = ConfigDict(frozen=True, **STRICT)  # mypy sees only what stands here
    __get_pydantic_core_schema__ = classmethod(strict_schema)
