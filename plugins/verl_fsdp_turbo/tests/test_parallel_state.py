"""The library's division of the ranks: when it is made, kept and dropped. Without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl_engine.contract.errors import PluginError, UnsupportedError
from verl_fsdp_turbo import parallel_state
from verl_fsdp_turbo.parallel_state import RankDivision, divide_ranks

SIZES = dict.fromkeys(parallel_state._AXES, 1)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with a process group in which another one was divided, which is gone."""
    other: Any = SimpleNamespace(get_group=lambda _: "gone")
    monkeypatch.setattr(parallel_state, "_made", [RankDivision(library(can_reset=True), other, SIZES)])
    monkeypatch.setattr(parallel_state, "is_alive", lambda group: group != "gone")
    monkeypatch.setattr(parallel_state, "dist", SimpleNamespace(is_initialized=lambda: True))


def library(*, can_reset: bool) -> Any:
    """A library whose only state has no group bigger than one."""
    resets: list[bool] = []
    state = SimpleNamespace(
        init_parallel_state=lambda _: SimpleNamespace(get_group_size=lambda _: 1),
        reset_parallel_state=lambda: resets.append(True),
    )
    return SimpleNamespace(can_reset=can_reset, state=state, resets=resets, build_config=dict)


def test_the_process_group_comes_first_since_the_library_would_start_one_over_hccl() -> None:
    with pytest.raises(PluginError, match="would start a process group of its own, over hccl"):
        divide_ranks(library(can_reset=True), {"distributed": SIZES})


@pytest.mark.usefixtures("gone")
def test_a_division_over_a_group_that_is_gone_is_made_anew() -> None:
    found = library(can_reset=True)
    made = divide_ranks(found, {"distributed": SIZES})
    assert found.resets == [True]
    assert parallel_state._made == [made]


@pytest.mark.usefixtures("gone")
def test_an_older_release_cannot_divide_anew() -> None:
    with pytest.raises(UnsupportedError, match="newer releases have reset_parallel_state"):
        divide_ranks(library(can_reset=False), {"distributed": SIZES})


class State:
    """Meshes of a release, by axis; it gives each with the axis's own name."""

    def __init__(self, *axes: str) -> None:
        self.axes = axes

    def get_rank(self, name: str) -> Any:
        assert name in self.axes
        return name

    get_group = get_group_size = get_rank


class NewerState(State):
    """Has a method for its mesh of the data."""

    def get_data_group(self) -> Any:
        return self.get_group("data")


def test_shares_of_the_data_are_those_of_the_release_s_own_mesh() -> None:
    any_library = library(can_reset=True)
    newer: Any = RankDivision(any_library, NewerState("data", "cdp"), SIZES).data_parallel
    older: Any = RankDivision(any_library, State("cdp"), SIZES).data_parallel
    assert (newer.rank, newer.size, newer.group) == ("data", "data", "data")
    assert (older.rank, older.size, older.group) == ("cdp", "cdp", "cdp")
