"""The port at which trainer ranks meet."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlparse

import pytest
import torch.distributed as dist

from verl_async.ray.trainer import TrainerActor
from verl_engine.contract.engine_config import EngineConfig


def test_a_free_port_is_taken_at_once_and_the_group_is_made_there() -> None:
    # A port that was only looked up was once given to another process, while this one imported its framework.
    actor = TrainerActor(EngineConfig(backend="toy"), Path("model"), rank=0, num_ranks=1)
    address = actor.address(None)
    place = urlparse(address)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((place.hostname, place.port))
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    dist.destroy_process_group()


def test_a_configured_port_is_left_alone() -> None:
    actor = TrainerActor(EngineConfig(backend="toy"), Path("model"), rank=0, num_ranks=1)
    assert actor.address(12345).endswith(":12345")
