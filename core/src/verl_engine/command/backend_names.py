"""The names of a new backend: in a job, of its package, of its distribution and its classes."""

import importlib.util
import keyword
import re
from dataclasses import dataclass
from typing import Final, Self

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import list_plugins
from verl_engine.host.distributions import installed_distributions, normalize_name

_OTHERS: Final = frozenset(
    {
        "accelerate", "deepspeed", "megatron", "mindspeed", "numpy", "pytest", "ray", "tests", "torch", "torch_npu",
        "transformers", "verl", "vllm",
    }
)  # fmt: skip
"""Packages that an engine imports, or may stand beside, also where they are not installed yet."""
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class BackendNames:
    """All that follows from the name that the user gave."""

    backend: str
    """In a job, as ``engine.backend``."""
    package: str
    """For imports."""
    distribution: str
    """For pip, as PEP 503 normalises it."""
    prefix: str
    """Of the classes: ``My`` in ``MyConfig`` and ``MyEngine``."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Derive the names; a ConfigError where the name is none, or would collide with something."""
        if not _NAME.fullmatch(name):
            close = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")
            advice = f", such as {close}" if _NAME.fullmatch(close) else ""
            raise ConfigError(
                f"NAME={name!r} must be lower-case letters and digits, in parts joined by single - or _, and start "
                f"with a letter{advice}"
            )
        package = name.replace("-", "_")
        names = cls(package, package, normalize_name(name), _class_prefix(package))
        _check_free(names)
        return names


def _class_prefix(package: str) -> str:
    parts = package.split("_")
    if len(parts) > 1 and parts[-1] == "engine":  # the class is to be MyEngine, not MyEngineEngine
        parts.pop()
    return "".join(part.capitalize() for part in parts)


def _check_free(names: BackendNames) -> None:
    if keyword.iskeyword(names.package) or keyword.issoftkeyword(names.package):
        raise ConfigError(
            f"NAME={names.package!r} is a keyword of Python; choose another, such as {names.package}_engine"
        )
    owners = {entry.name: entry.distribution for entry in list_plugins(BACKEND)}
    owner = owners.get(names.backend) or BACKEND.known.get(names.backend)
    if owner is None and names.distribution in installed_distributions():
        owner = names.distribution
    if owner is not None:
        raise ConfigError(f"NAME={names.backend!r} is taken by the distribution {owner}; choose another")
    if names.package in _OTHERS or importlib.util.find_spec(names.package) is not None:
        raise ConfigError(
            f"NAME={names.package!r} is the name of another module, which the new package would hide; choose another, "
            f"such as {names.package}_engine"
        )
