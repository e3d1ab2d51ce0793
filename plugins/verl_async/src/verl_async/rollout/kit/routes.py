"""The experts that tokens went through, against plain transformers.

Shapes: L tokens of prompt and response, E experts, k of them a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from verl_async.rollout.kit.bench import PROMPTS, request
from verl_async.rollout.kit.models import EXPERTS_PER_TOKEN, build_model
from verl_async.rollout.kit.pauses import in_mid_generation
from verl_async.rollout.kit.weights import load_weights, weights_of
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from verl_async.rollout.interface import Generation, GenerationRequest
    from verl_async.rollout.kit.bench import Bench, Stream

_CLOSE: Final = 1e-4
"""Difference of two scores that rounding may turn around."""


def read(bench: Bench) -> None:
    """Experts come of all tokens of prompt and response but the last, from where they are wanted on."""
    stream = _stream(bench)
    asked = [
        *(request(prompt, seed, num=3 + 4 * seed, routed_experts_from=0) for prompt in PROMPTS for seed in range(3)),
        request(PROMPTS[2], 8, routed_experts_from=5),
    ]
    group = request(PROMPTS[2], 4, 5, 6, 7, routed_experts_from=0)
    _require_right([*asked, *[group] * 4], stream.generate(*asked, group))
    [unasked] = stream.generate(request())
    require(unasked.routed_experts is None, "experts came that nobody asked for")


def goes_on(bench: Bench) -> None:
    """A sample that was interrupted, and the next turn of a conversation, have the experts of all tokens too."""
    stream = _stream(bench)
    asked = in_mid_generation(stream, routed_experts_from=0)
    stream.engine.pause("abort")
    back = stream.take(len(asked))
    _require_right([one.request for one in back], [one.generation for one in back])
    stream.engine.resume()
    stream.submit(*(replace(one.request, so_far=(one.generation,)) for one in back))
    back = stream.take(len(asked))
    _require_right([one.request for one in back], [one.generation for one in back])
    turn = request(PROMPTS[2], num=20, affinity_key="conversation")
    for first in (None, 0, 0, None, 25, 90):
        turn = replace(turn, routed_experts_from=first)
        [answer] = stream.generate(turn)
        if first is not None:
            _require_right([turn], [answer])
        turn = replace(turn, prompt_ids=(*turn.prompt_ids, *answer.token_ids, 7, 8))


def over_update(bench: Bench) -> None:
    """Over an update each token keeps the experts of the weights that drew the token behind it."""
    stream = _stream(bench)
    asked = in_mid_generation(stream, routed_experts_from=0)
    stream.engine.pause("abort")
    back = stream.take(len(asked))
    load_weights(stream.engine, weights_of("experts", 1), 1)
    stream.engine.resume()
    stream.submit(*(replace(one.request, so_far=(one.generation,)) for one in back))
    back = stream.take(len(asked))
    _require_right([one.request for one in back], [one.generation for one in back], (0, 1))
    if "keep" in bench.spec.gaps:
        return
    asked = in_mid_generation(stream, routed_experts_from=0)
    stream.engine.pause("keep")
    load_weights(stream.engine, weights_of("experts", 2), 2)
    stream.engine.resume()
    back = stream.take(len(asked))
    _require_right([one.request for one in back], [one.generation for one in back], (0, 1, 2))


def _stream(bench: Bench) -> Stream:
    return bench.fresh("experts", routed_experts=True)


def _require_right(
    asked: Iterable[GenerationRequest], found: Iterable[Generation], seeds_by_version: Sequence[int] = (0,)
) -> None:
    """Compare with the routers of plain transformers, where their choice is not a close one."""
    models = [build_model("experts", seed) for seed in seeds_by_version]
    for one, generation in zip(asked, found, strict=True):
        assert one.routed_experts_from is not None
        experts = generation.routed_experts
        require(experts is not None, "no experts came")
        assert experts is not None
        num_tokens = len(one.prompt_ids) + len(generation.token_ids) - 1
        right = (num_tokens - one.routed_experts_from, 2, EXPERTS_PER_TOKEN)
        require(
            experts.shape == right and experts.dtype in (np.uint8, np.int16),
            f"experts came as {experts.dtype} {list(experts.shape)}, not as uint8 or int16 {list(right)}",
        )
        ids = (*one.prompt_ids, *generation.token_ids)
        choices = [_choice(model, ids) for model in models]
        versions = [generation.weight_versions[0]] * (len(one.prompt_ids) - 1) + generation.weight_versions
        for place in range(one.routed_experts_from, num_tokens):
            right_Lk, is_close = choices[versions[place]]
            own = np.sort(experts[place - one.routed_experts_from])
            require(
                bool((is_close[place] | (own == right_Lk[place]).all(-1)).all()),
                f"token {place} of {num_tokens}, under version {versions[place]}, went through {own.tolist()}, and in "
                f"plain transformers through {right_Lk[place].tolist()}",
            )


@torch.no_grad()
def _choice(model: Any, ids: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return [L, layers, k]: the experts, in ascending order; and [L, layers]: whether the next was almost as good."""
    scores: list[torch.Tensor] = []

    def note(_gate: torch.nn.Module, given: Any, _output: Any) -> None:
        scores.append((given[0].flatten(0, -2) @ _gate.weight.T).softmax(-1))

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    best = torch.stack(scores, 1).topk(EXPERTS_PER_TOKEN + 1)
    is_close = best.values[..., -2] - best.values[..., -1] < _CLOSE
    return best.indices[..., :-1].sort(-1).values.numpy(), is_close.numpy()
