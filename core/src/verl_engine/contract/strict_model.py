"""The base of every config section."""

import os

from pydantic import BaseModel, ConfigDict, create_model


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


class StrictModel(BaseModel):
    """Frozen; unknown keys and wrong types are refused; field docstrings become descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )
