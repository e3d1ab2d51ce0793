"""The random number generators of a process: their state, and seeding them anew."""

import random
from typing import Any

import numpy as np
import torch

from verl_engine.engine.device import Device


def rng_state(device: Device) -> dict[str, Any]:
    """Return copies of the states of torch (CPU, and the accelerator's if there is one), Python and numpy."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002 - the global one is what user code draws from
    if device.kind != "cpu":
        state["device"] = torch.get_device_module(device.kind).get_rng_state(device.index)
    return state


def restore_rng(state: dict[str, Any], device: Device) -> None:
    """Go on drawing where a state was taken. On another kind of device its own generator stays as it is."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - as above
    if device.kind != "cpu" and "device" in state:
        torch.get_device_module(device.kind).set_rng_state(state["device"], device.index)


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seed all generators; other numbers for each step and rank, the same ones each time."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(2)
    torch.manual_seed(int(words[0]))  # the accelerator's too
    random.seed(int(words[1]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - as above
