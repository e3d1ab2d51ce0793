"""Log-probs of chosen token ids: those that the field ``top_k_ids`` names, or each distribution's most likely ones.

Shape legend: M rows of logits, V vocabulary, k chosen ids, N = 1 + k: a loss token and what is chosen beside it.
"""

from typing import Final

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import BatchError

_LOW_BITS: Final = 0xFFFFFFFF


def scored_ids(batch: PackedBatch, positions: torch.Tensor) -> torch.Tensor:
    """Return the ids whose log-probs are asked for at [M] int64 positions of the micro-batch.

    Returns:
        [M, N] int64: the tokens themselves, then those of ``top_k_ids``; or, where ``batch.top_k`` is above 0, so many
            columns for `fill_top_ids`.
    """
    ids_M1 = batch.input_ids[positions, None]
    if batch.top_k:
        return torch.cat([ids_M1, ids_M1.new_zeros(len(positions), batch.top_k)], dim=1)
    chosen = batch.fields.get("top_k_ids")
    return ids_M1 if chosen is None else torch.cat([ids_M1, chosen[positions].long()], dim=1)


def fill_top_ids(ids_MN: torch.Tensor, logits_MV: torch.Tensor, top_k: int) -> None:
    """Write into the last `top_k` columns the ids of each row's highest logits, in descending order.

    Logits are compared in float32; of equal ones the lowest id comes first, on every kind of device. A BatchError where
    there are fewer.
    """
    if top_k:
        require_top_k(top_k, logits_MV.shape[1])
        ids_MN[:, -top_k:] = ids_of_keys(top_keys(logits_MV, top_k))


def require_top_k(top_k: int, vocab_size: int) -> None:
    """Refuse to choose more ids than there are, with a BatchError."""
    if top_k > vocab_size:
        raise BatchError(f"top_k={top_k} asks for more ids than the vocabulary has; use 1 to {vocab_size}")


def top_keys(logits_MV: torch.Tensor, top_k: int, first: int = 0) -> torch.Tensor:
    """Return [M, k] int64, descending: keys that are ordered as logits are, of equal ones the lowest id's first.

    So the highest keys of all parts of a split vocabulary are the keys of the whole; `first` is the id of the first
    column. Logits of any float dtype are compared in float32; `top_k` is at most V.
    """
    bits_MV = (logits_MV.detach().float() + 0.0).view(torch.int32)  # a copy, in which -0 is 0
    bits_MV ^= (bits_MV >> 31).bitwise_and_(0x7FFFFFFF)  # negative floats are ordered the other way round
    keys_MV = bits_MV.long().bitwise_left_shift_(32)
    keys_MV |= (_LOW_BITS - first) - torch.arange(logits_MV.shape[1], device=logits_MV.device)
    return keys_MV.topk(top_k, dim=1).values


def ids_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """Return the ids, int64, that keys of `top_keys` hold."""
    return _LOW_BITS - (keys & _LOW_BITS)
