"""Rollout requests across Ray: coalesced on the way, and calls that control the engine are heard beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from examples.addition_data import save_model
from tests.end_to_end import ENVIRONMENT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster

SCRIPT = """
import asyncio, json, sys
from pathlib import Path
import ray
from verl_async.ray.rollout import RayRolloutClient
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.interface import GenerationRequest, SamplingParams
from verl_engine.contract.errors import ConfigError

def request(number, num):
    return GenerationRequest((3, 4, number % 7), SamplingParams(num), (number, number + 1000), request_id=str(number))

async def arrive(done, count):
    while len(done) < count:
        await asyncio.sleep(0.01)

async def main():
    client = RayRolloutClient(0, EmbeddedConfig(device="cpu"), Path(sys.argv[2]), {"num_cpus": 1})
    await client.start()
    serving = asyncio.ensure_future(client.serve())
    calls, submit = [], client.actor.submit.remote
    class Counted:
        def remote(self, requests, sealed):
            calls.append(len(requests))
            return submit(requests, sealed)
    class Actor:
        submit = Counted()
        def __getattr__(self, name):
            return getattr(actor, name)
    actor, client.actor = client.actor, Actor()
    done = []
    for number in range(300):
        client.submit([request(number, 40)], done.append)
    while (await client.stats()).drawn_tokens == 0:
        pass
    await client.pause("abort")
    await arrive(done, 600)
    reasons = {one.generation.finish_reason for one in done}
    keys = {(one.request.request_id, one.index) for one in done}
    client.submit([request(1, 3)], done.append)
    await client.resume()
    await arrive(done, 602)
    client.submit([request(0, 10**6)], done.append)
    refused = ""
    try:
        await serving
    except ConfigError as error:
        refused = str(error)
    await client.close()
    last = [len(one.generation.token_ids) for one in done[-2:]]
    print(json.dumps([calls[0], sorted(reasons), len(keys), last, refused]))

ray.init(address=sys.argv[1], log_to_driver=False)
asyncio.run(asyncio.wait_for(main(), 120))
"""


@pytest.mark.dist
@pytest.mark.slow
def test_requests_are_coalesced_and_a_pause_is_heard_beside_them(cluster: Cluster, tmp_path: Path) -> None:
    save_model(tmp_path / "model", seed=0)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, cluster.address, str(tmp_path / "model")],
        env={**os.environ, **ENVIRONMENT, **cluster.environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    num_first, reasons, num_keys, last, refused = json.loads(done.stdout.splitlines()[-1])
    assert num_first == 300, "one call for all requests of a turn"
    assert "interrupted" in reasons
    assert (num_keys, last) == (600, [3, 3])
    assert "1000000 new ones" in refused or "makes" in refused
