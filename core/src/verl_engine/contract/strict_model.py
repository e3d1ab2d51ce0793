"""The base of every config section."""

from pydantic import BaseModel, ConfigDict


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
