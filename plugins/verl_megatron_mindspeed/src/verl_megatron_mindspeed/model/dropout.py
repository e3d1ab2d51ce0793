"""The random numbers that dropout is drawn from."""

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig

from verl_engine.engine.device import Device


def seed_dropout(device: Device, seed: int) -> None:
    """Seed the generators that Megatron keeps for dropout; a tensor-parallel rank's number is added to it.

    The process's own random numbers are left alone, which Megatron would seed too.
    """
    indices = [] if device.kind == "cpu" else [device.index]
    with torch.random.fork_rng(devices=indices, device_type="cuda" if device.kind == "cpu" else device.kind):
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def reseed_dropout(transformer: TransformerConfig, device: Device) -> None:
    """Draw a new seed from the process's own random numbers, before each pass that trains.

    Checkpoints keep those, and know nothing of Megatron's: so a resumed run draws the same dropout. What each rank
    draws is its own, which is right for attention's dropout: no two ranks have the same tokens and heads.
    """
    if transformer.attention_dropout:
        seed_dropout(device, int(torch.randint(2**62, ())))
