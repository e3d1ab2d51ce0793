"""Whether an engine gives what an algorithm needs. Found before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_async.algorithms.names import LOSSES
from verl_async.algorithms.reference_policy import forward_only
from verl_engine.contract.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from verl_async.algorithms.algorithm import Algorithm
    from verl_engine.contract.backend import BackendSpec
    from verl_engine.contract.engine_config import EngineConfig


def check_engine(algorithm: Algorithm, engine: EngineConfig, spec: BackendSpec) -> None:
    """Refuse an engine without the entropy or the reference policy that the algorithm needs.

    Raises:
        ConfigError: ``engine.entropy`` does not fit, or a setting does not go with a reference.
        UnsupportedError: the backend has no forward-only engine for a reference.
    """
    coefficient = algorithm.config.entropy_coefficient
    if coefficient and engine.entropy != "gradient":
        raise ConfigError(
            f"algorithm.entropy_coefficient={coefficient:g} needs the gradient of the entropy, and engine.entropy="
            f"{engine.entropy}; set engine.entropy=gradient"
        )
    if engine.entropy == "gradient" and not coefficient and algorithm.config.loss in LOSSES:
        raise ConfigError(
            f"engine.entropy=gradient: neither algorithm.loss={algorithm.config.loss} nor algorithm.entropy_coefficient"
            "=0 uses the gradient; use value, which makes a metric of the entropy, or set the coefficient"
        )
    if algorithm.needs_reference and engine.lora is None:
        try:
            spec.require("forward_only")
        except UnsupportedError as error:
            raise UnsupportedError(
                f"the algorithm needs a reference policy, which is a forward-only engine, but {error}; train an "
                "adapter (engine.lora), whose model is its own reference, or set algorithm.kl=null"
            ) from error
        forward_only(engine)
