"""A Ray cluster that somebody else started may die while a job runs."""

from __future__ import annotations

import asyncio

import pytest

from verl_async.ray import cluster as clusters
from verl_async.ray.answers import ActorError
from verl_async.ray.cluster import Cluster, ClusterDiedError


@pytest.mark.fault(14)
def test_a_cluster_of_elsewhere_that_stops_listening_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_CALL_S", 0.05)
    monkeypatch.setattr(clusters, "_SILENT_S", 0.2)
    ended: list[str] = []

    async def work(head: asyncio.Server) -> str:
        try:
            await asyncio.sleep(0.4)  # longer than a dead cluster is waited for: this one lives
            head.close()
            await asyncio.sleep(60.0)
            return "finished"
        finally:
            ended.append("work")

    async def run() -> None:
        head = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1")
        host, port = head.sockets[0].getsockname()
        await Cluster(None, f"{host}:{port}").alive_during(work(head))

    with pytest.raises(ClusterDiedError, match=r"the Ray cluster at 127\.0\.0\.1:\d+ does not answer any more"):
        asyncio.run(run())
    assert ended == ["work"]


@pytest.mark.fault(14)
def test_an_actor_that_dies_with_its_cluster_is_not_blamed() -> None:
    async def work() -> None:
        raise ActorError("trainer rank 1 died")

    with pytest.raises(ClusterDiedError, match=r"the Ray cluster at 127\.0\.0\.1:1 does not answer any more"):
        asyncio.run(Cluster(None, "127.0.0.1:1").alive_during(work()))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_work_that_ends_is_given_back_whoever_listens(address: str) -> None:
    async def work() -> int:
        return 3

    assert asyncio.run(Cluster(None, address).alive_during(work())) == 3
