from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import forget_groups
from verl_megatron_mindspeed.cpu_support.patch_list import PATCHES, TENSOR_PATCHES, TORCH_PATCHES

if TYPE_CHECKING:
    from verl_engine.testing.rank_pool import RankPool


def _import_megatron() -> None:
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401


def _original(target: str) -> Any:
    from verl_engine.patching.patches import replaced_objects
    from verl_engine.patching.target import Target

    return replaced_objects(Target.parse(target))[0]


def _check_patches(_rank: int) -> set[str]:
    import verl_megatron_mindspeed.hooks as backend
    from verl_engine.patching.guard import require_preparation
    from verl_engine.patching.patches import records

    _import_megatron()
    preparation = require_preparation(backend, "megatron", backend.SPEC)
    assert preparation is not None
    preparation.check_names()
    assert preparation.stale_references() == []
    assert all(record.reason and record.how == "first import" for record in records())
    return {f"{record.module}:{record.name}" for record in records()}


def test_what_is_patched_is_what_is_listed_and_the_host_finds_it_in_place(ranks: RankPool) -> None:
    assert ranks.run(_check_patches) == [{patch.target for patch in PATCHES}] * 2


def _prepare_again(_rank: int) -> None:
    from plugins.verl_megatron_mindspeed.tests.prepared_ranks import prepare

    prepare()


def test_a_process_can_be_prepared_twice(ranks: RankPool) -> None:
    ranks.run(_prepare_again)


def _look_at_torch(_rank: int) -> list[object]:
    import torch
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch is not torch
    assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros([], device="cuda")
    return [torch.cuda.is_available(), torch.zeros(1).type(), torch.overrides._get_current_function_mode_stack()]


def test_torch_stays_as_it_is_for_everybody_else(ranks: RankPool) -> None:
    assert ranks.run(_look_at_torch) == [[False, "torch.FloatTensor", []]] * 2


def test_the_fake_for_torch_changes_only_where_cuda_is_asked_for() -> None:
    import torch

    from verl_megatron_mindspeed.cpu_support import torch_on_cpu as fake

    cuda = torch.device("cuda", 1)
    made = [
        fake.arange(2, device="cuda"),
        fake.empty(2, device="cuda:0"),
        fake.full((2,), 1.0, device=cuda),
        fake.ones(2, device=fake.cuda.current_device()),
        fake.tensor([1, 2], device="cuda", pin_memory=True),
        fake.zeros(2, device=None),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert fake.empty(2, device="meta").device.type == "meta"
    assert (fake.Tensor, fake.distributed.ReduceOp) == (torch.Tensor, torch.distributed.ReduceOp)
    assert fake.cuda.is_available is torch.cuda.is_available
    with pytest.raises(AttributeError, match="absent"):
        _ = fake.absent


def _uneven(rank: int) -> tuple[list[float], list[float], bool]:
    """Exchange a row of the first rank and two of the second, and back; and say whether torch's own refuses it."""
    import torch
    import torch.distributed as dist

    from verl_megatron_mindspeed.cpu_support import torch_on_cpu as fake

    own = torch.tensor([[1.0], [2.0]])[: rank + 1] + 10 * rank
    gathered = torch.empty(3, 1)
    fake.distributed.all_gather(list(gathered.split([1, 2])), own)
    kept = torch.empty_like(own)
    fake.distributed.reduce_scatter(kept, list((gathered * (rank + 1)).split([1, 2])))
    try:
        dist.all_gather(list(gathered.split([1, 2])), own)
    except RuntimeError as error:
        return gathered[:, 0].tolist(), kept[:, 0].tolist(), "invalid tensor size" in str(error)
    return gathered[:, 0].tolist(), kept[:, 0].tolist(), False


def test_parts_of_different_lengths_can_be_gathered_and_scattered(ranks: RankPool) -> None:
    whole = [1.0, 11.0, 12.0]
    # Each rank's sum is once its own and twice the other's: three times as much.
    assert ranks.run(_uneven) == [(whole, [3.0], True), (whole, [33.0, 36.0], True)]


def test_streams_and_events_of_the_fake_have_nothing_to_wait_for() -> None:
    from verl_megatron_mindspeed.cpu_support import cuda_on_cpu as cuda

    side = cuda.Stream(device=cuda.current_device())
    with cuda.stream(side):
        side.wait_stream(cuda.current_stream())
    assert side != cuda.current_stream()
    side.record_event().synchronize()
    cuda.synchronize()


def test_tensors_answer_as_on_cuda_inside_one_call_of_one_thread_only() -> None:
    import torch

    from verl_megatron_mindspeed.cpu_support.tensors_like_cuda import with_tensors_like_cuda

    tensor, half, seen = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), []

    def ask() -> list[object]:
        other = threading.Thread(target=lambda: seen.append(tensor.type()))
        other.start()
        other.join()
        return [tensor.type(), half.type(), tensor.type(torch.int64).dtype, tensor.cuda() is tensor]

    results = with_tensors_like_cuda(ask)()
    assert results == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", torch.int64, True]
    assert (seen, tensor.type()) == (["torch.FloatTensor"], "torch.FloatTensor")


def _clip(_rank: int) -> tuple[list[float], str]:
    import torch
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32 as clip

    parameter, gradients, errors = torch.nn.Parameter(torch.zeros(2)), [], []

    def in_a_worker_s_thread() -> None:
        parameter.grad = torch.tensor([3.0, 4.0])
        clip([parameter], max_norm=1.0, total_norm=5.0)
        gradients.extend(parameter.grad.tolist())
        try:
            _original(TENSOR_PATCHES[0].target)([parameter], max_norm=1.0, total_norm=5.0)
        except AssertionError as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=in_a_worker_s_thread)
    thread.start()
    thread.join()
    return gradients, errors[0]


def test_gradients_are_clipped_in_any_thread_and_would_be_refused_without_the_patch(ranks: RankPool) -> None:
    gradients, error = ranks.run(_clip)[0]
    assert gradients == pytest.approx([0.6, 0.8], abs=1e-5)  # of length 5, to length 1
    assert error == "AssertionError"


def _draw(_rank: int) -> tuple[float, float, float, bool]:
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    forget_groups()
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    tracker, before = tensor_parallel.get_cuda_rng_tracker(), torch.get_rng_state()
    with tracker.fork():
        own = torch.rand(()).item()
    with tracker.fork():
        next_own = torch.rand(()).item()
    is_back = torch.equal(torch.get_rng_state(), before)
    return own, next_own, torch.rand(()).item(), is_back


def test_dropout_draws_its_own_numbers_on_each_tensor_parallel_rank_and_the_generator_comes_back(
    ranks: RankPool,
) -> None:
    (own_0, next_0, common_0, is_back_0), (own_1, next_1, common_1, is_back_1) = ranks.run(_draw)
    assert len({own_0, next_0, own_1, next_1}) == 4
    assert common_0 == common_1
    assert is_back_0
    assert is_back_1


def _route(_rank: int) -> tuple[str, str, list[bool]]:
    import torch
    from megatron.core.transformer.moe import moe_utils, router

    torch.manual_seed(0)
    tokens = torch.randn(3, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn(2, 4, requires_grad=True), torch.randn(2, requires_grad=True)
    scores = router.router_gating_linear(tokens, weight, bias, torch.float32)
    scores.sum().backward()
    assert tokens.grad is not None
    assert weight.grad is not None
    by_hand = tokens.detach().float() @ weight.detach().t() + bias.detach()
    matches = [
        torch.equal(scores, by_hand),
        torch.equal(tokens.grad, weight.detach().sum(0).to(torch.bfloat16).expand(3, 1, 4)),
        torch.allclose(weight.grad, tokens.detach().float().sum((0, 1)).expand(2, 4)),
    ]
    error = ""
    if not hasattr(moe_utils, "te_general_gemm"):
        try:
            _original("megatron.core.transformer.moe.moe_utils:router_gating_linear")(
                tokens, weight, None, torch.float32
            )
        except NameError as failure:
            error = str(failure)
    return str(scores.dtype), error, matches


def test_the_router_scores_in_its_own_dtype_and_would_miss_a_name_without_the_patch(ranks: RankPool) -> None:
    dtype, error, matches = ranks.run(_route)[0]
    assert (dtype, matches) == ("torch.float32", [True] * 3)
    assert "te_general_gemm" in error


def _move(_rank: int) -> list[str]:
    import torch
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu as move

    original, counts = _original("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu"), torch.ones(2)
    moved = [move(counts, as_numpy=True), original(counts, as_numpy=True), move(counts), move([1, 2], as_numpy=True)]
    return [type(thing).__name__ for thing in moved]


def test_the_counts_of_tokens_come_as_numpy_where_megatron_asks_for_it(ranks: RankPool) -> None:
    assert ranks.run(_move)[0] == ["ndarray", "Tensor", "Tensor", "list"]


def test_each_listed_module_asks_for_cuda_and_has_torch_under_its_own_name(ranks: RankPool) -> None:
    assert all(ranks.run(_asks_for_cuda)[0].values())


def _asks_for_cuda(_rank: int) -> dict[str, bool]:
    import importlib
    import inspect

    sources = {
        patch.target: inspect.getsource(importlib.import_module(patch.target.partition(":")[0]))
        for patch in TORCH_PATCHES
    }
    asks = ("torch.cuda.", 'device="cuda"', "device='cuda'")
    return {target: any(words in source for words in asks) for target, source in sources.items()}
