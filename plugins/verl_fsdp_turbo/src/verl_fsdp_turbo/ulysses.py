"""One micro-batch through a model whose sequences the library splits over ranks.

Its patched attention sees all tokens of some heads, through the mask that it is given: so the mask is of the whole
micro-batch, on every rank.

Shape legend: P ranks that split sequences; T tokens of a packed micro-batch, filled up so that P divides them,
t = T / P; N sequences, L the longest, filled up likewise, l = L / P; m loss tokens that this rank predicts.
"""

from typing import Final

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl_engine.batch.packed import PackedBatch, SegmentRun
from verl_engine.contract.bounded import divisors
from verl_engine.contract.errors import ModelError
from verl_fsdp.forward.model_run import ModelRun, packed, padded
from verl_fsdp_turbo.config import FsdpTurboConfig

_HEADS: Final = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
"""transformers' names for what the ranks divide: heads of attention, and of its linear kind."""
_LAYERS: Final = frozenset({"full_attention", "linear_attention"})
"""Those of transformers' layer types that the masks made here are right for."""


def require_splittable(model: PreTrainedModel, num_ranks: int) -> None:
    """Raise ModelError where the ranks cannot divide the heads, or a layer needs a mask of its own."""
    text_config, name = model.config.get_text_config(decoder=True), type(model).__name__
    for field in _HEADS:
        heads = getattr(text_config, field, None)
        if isinstance(heads, int) and heads % num_ranks:
            kind = "attention heads" if field == _HEADS[0] else field
            raise ModelError(
                f"engine.ulysses_parallel_size={num_ranks} does not divide the {heads} {kind} of {name}; use one of "
                f"{divisors(heads)}"
            )
    # Models whose layers are all alike do not name them.
    unnamed = {"sliding_attention"} if getattr(text_config, "sliding_window", None) else set()
    kinds = set(getattr(text_config, "layer_types", None) or unnamed) - _LAYERS
    if kinds:
        raise ModelError(
            f"{name} has layers that see a part of the sequence only ({', '.join(sorted(kinds))}), and with "
            f"engine.ulysses_parallel_size={num_ranks} they would see all of it; use engine.sequence_parallel_size"
        )


def split_run(config: FsdpTurboConfig, batch: PackedBatch, group: dist.ProcessGroup, dtype: torch.dtype) -> ModelRun:
    """Make a rank's model run of a micro-batch, which is the same on every rank of the group that splits sequences."""
    if not config.packing:
        return _rows(config, batch, group, dtype)
    run = packed(batch, group)
    runs = run.inputs.pop("packed_runs")
    del run.inputs["sequence_group"]
    run.inputs["attention_mask"] = block_mask(runs, batch.input_ids.device, dtype)
    return run


def block_mask(runs: tuple[SegmentRun, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return [1, 1, T, T]: 0 where token i (row) may see token j (column), else the lowest number of the dtype.

    That is: j is of i's sequence, and not after it. Memory grows with the square of T: eager attention has such a
    matrix for each head anyway.
    """
    lengths = [run.length for run in runs for _ in range(run.num_sequences)]
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    positions = torch.arange(len(sequences), device=device)
    sees = (sequences[:, None] == sequences[None, :]) & (positions[:, None] >= positions[None, :])
    mask = torch.zeros(sees.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[None, None]


def _rows(config: FsdpTurboConfig, batch: PackedBatch, group: dist.ProcessGroup, dtype: torch.dtype) -> ModelRun:
    """Give each sequence a row, padded on the right; the model's output has this rank's [N, l].

    The model gets either all [N, L] with the mask of what is padding, and cuts; or [N, l] with one of all L: a token
    sees those up to itself, none of which is padding, as that comes last.
    """
    run = padded(batch)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    num_rows, longest = run.inputs["input_ids"].shape
    num_own = -(-longest // size)
    fill = (0, num_own * size - longest)
    device = batch.input_ids.device
    input_ids = torch.nn.functional.pad(run.inputs["input_ids"], fill)
    position_ids = torch.arange(num_own * size, device=device).expand(num_rows, -1)
    if batch.has_own_positions:
        position_ids = torch.nn.functional.pad(run.inputs["position_ids"], fill)
    if config.cp_plan.tokens_split_by == "model":
        attention_mask = torch.nn.functional.pad(run.inputs["attention_mask"], fill)
    else:
        own = slice(rank * num_own, (rank + 1) * num_own)
        input_ids, position_ids = input_ids[:, own], position_ids[..., own]
        one_row = (SegmentRun(0, 1, num_own * size),)
        attention_mask = block_mask(one_row, device, dtype).expand(num_rows, -1, -1, -1)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "use_cache": False,
    }
    is_own = run.columns // num_own == rank
    columns = run.columns[is_own] - rank * num_own
    return ModelRun(inputs, run.rows[is_own], columns, run.loss_positions[is_own], num_own)
