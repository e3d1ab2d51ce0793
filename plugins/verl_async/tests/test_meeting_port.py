"""The port at which trainer ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlparse

import pytest
import ray.util
import torch.distributed as dist

from verl_async.ray.trainer import TrainerActor
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError


def test_a_free_port_is_taken_at_once_and_the_group_is_made_there() -> None:
    # A port that was only looked up was once given to another process, while this one imported its framework.
    actor = TrainerActor(EngineConfig(backend="toy"), Path("model"), rank=0, num_ranks=1)
    address = actor.address(None)
    place = urlparse(address)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((place.hostname, place.port))
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.fault(19)
@pytest.mark.parametrize("is_configured", [False, True])
def test_only_this_machine_is_listened_to(monkeypatch: pytest.MonkeyPatch, is_configured: bool) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] if is_configured else None
    actor = TrainerActor(EngineConfig(backend="toy"), Path("model"), rank=0, num_ranks=1)
    found = urlparse(actor.address(port))
    assert found.port is not None
    assert not is_configured or found.port == port
    with socket.create_server(("127.0.0.2", found.port)):
        pass  # a server on all interfaces would have this one too


def test_a_configured_port_that_is_taken_is_named() -> None:
    actor = TrainerActor(EngineConfig(backend="toy"), Path("model"), rank=0, num_ranks=1)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"trainer.master_port={port} cannot be used on .*in use"):
            actor.address(port)
