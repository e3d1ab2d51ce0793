"""An engine that lacks methods, and whose backend does not say so, is refused when it is created."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_engine import SPEC, FakeEngine, toy_host
from verl_engine import BackendHost, EngineConfig, hookimpl
from verl_engine.contract.backend import Capabilities
from verl_engine.contract.errors import PluginError, UnsupportedError
from verl_engine.engine.completeness import require_complete

if TYPE_CHECKING:
    from pathlib import Path


def bare_host(**gaps: str) -> BackendHost:
    """A backend with the required hook only."""

    @hookimpl
    def engine_create(config: EngineConfig, model_folder: Path, role: str) -> FakeEngine:
        raise NotImplementedError

    module = ModuleType("bare_hooks")
    vars(module)["SPEC"] = replace(SPEC, capabilities=Capabilities(gaps=gaps))
    vars(module)["engine_create"] = engine_create
    return BackendHost.from_module(module)


class Stepping(FakeEngine):
    def optimizer_step(self, learning_rate: float | None = None) -> None:  # type: ignore[override]
        del learning_rate


def test_declared_gaps_and_own_hooks_need_no_methods() -> None:
    require_complete(FakeEngine(), toy_host(), 2)


def test_what_is_missing_is_named_with_the_feature() -> None:
    gaps = dict.fromkeys(("checkpoints", "lora", "weight_import", "weight_shards"), "as the test says")
    with pytest.raises(
        PluginError,
        match=r"FakeEngine lacks optimizer_step \(for the hook engine_optimizer_step\), "
        r"local_weights \(feature 'snapshots'\), move \(feature 'offload'\); write what is missing",
    ):
        require_complete(FakeEngine(), bare_host(**gaps), 1)


def test_several_ranks_need_a_gradient_sync() -> None:
    host = bare_host(**SPEC.capabilities.gaps)
    require_complete(Stepping(), host, 1)
    with pytest.raises(PluginError, match=r"gradient_sync \(for the hook engine_gradient_sync, on 2 ranks\)"):
        require_complete(Stepping(), host, 2)


def test_the_default_context_is_for_a_single_rank() -> None:
    with FakeEngine().gradient_sync(is_last_micro_batch=False):
        pass
    with pytest.raises(UnsupportedError, match="lacks 'multi_rank'"):
        FakeEngine(size=2).gradient_sync(is_last_micro_batch=False)
