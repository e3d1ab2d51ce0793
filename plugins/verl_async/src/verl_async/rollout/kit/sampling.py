"""Tokens and log-probs: what is drawn, and how likely it was."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import torch

from verl_async.rollout.kit.bench import PROMPTS, request, require_log_probs
from verl_async.rollout.kit.models import VOCABULARY, build_model, log_probs_of
from verl_engine.contract.errors import ConfigError, UnsupportedError
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from verl_async.rollout.kit.bench import Bench

NUM_DRAWN: Final = 800
LARGEST_DISTANCE: Final = 0.12
"""Total variation; so many draws from 40 tokens are about 0.08 off."""


def temperature_one(bench: Bench) -> None:
    """Log-probs are those of plain transformers to 1e-4 nats, for prompts of all lengths together."""
    asked = [request(prompt, seed) for seed in range(3) for prompt in PROMPTS]
    require_log_probs(asked, bench.stream().generate(*asked))


def temperatures(bench: Bench) -> None:
    """At other temperatures log-probs are those of softmax(logits / temperature), each request's own."""
    asked = [request(prompt, 2, temperature=at) for at in (0.5, 1.7) for prompt in PROMPTS]
    require_log_probs(asked, bench.stream().generate(*asked))


def greedy(bench: Bench) -> None:
    """Temperature 0 takes the likeliest token; its log-prob is that of softmax(logits)."""
    asked = [request(prompt, temperature=0.0) for prompt in PROMPTS]
    found = bench.stream().generate(*asked)
    require_log_probs(asked, found)
    for one, sample in zip(asked, found, strict=True):
        best = log_probs_of(build_model("plain"), one.prompt_ids, sample.token_ids)[1].argmax(-1).tolist()
        require(best == sample.token_ids, f"took {sample.token_ids} where {best} are the likeliest")


def filtered(bench: Bench) -> None:
    """Under top-k and top-p log-probs are over the whole vocabulary too, or such requests are refused."""
    asked = [request(prompt, 3, **one) for one in ({"top_k": 3}, {"top_p": 0.5}) for prompt in PROMPTS]
    if "filtered_log_probs" not in bench.spec.gaps:
        require_log_probs(asked, bench.stream().generate(*asked))
        return
    try:
        bench.stream().submit(*asked)
    except (UnsupportedError, ConfigError):
        return
    raise AssertionError("'filtered_log_probs' is a declared gap, but a request for them is taken")


def not_wanted(bench: Bench) -> None:
    """Log-probs that a request does not want are left out."""
    [found] = bench.stream().generate(request(log_probs=False))
    require(found.log_probs == [] and len(found.token_ids) > 0, f"got {len(found.log_probs)} log-probs")


def distribution(bench: Bench) -> None:
    """Tokens are drawn as often as they are likely, at a temperature."""
    frequency = _frequencies(bench, temperature=2.0)
    logp_V = log_probs_of(build_model("plain"), PROMPTS[0], (0,), 2.0)[1][0]
    distance = 0.5 * float((frequency - logp_V.exp()).abs().sum())
    require(
        distance < LARGEST_DISTANCE,
        f"{NUM_DRAWN} tokens have a total variation distance of {distance:.3g}",
    )


def top_k_top_p(bench: Bench) -> None:
    """Top-k and top-p draw from their sets, all of them, and nothing else."""
    logp_V = log_probs_of(build_model("plain"), PROMPTS[0], (0,))[1][0]
    ranked = logp_V.argsort(descending=True)
    num_nucleus = int((logp_V[ranked].exp().cumsum(0) < 0.6).sum()) + 1  # noqa: PLR2004
    for name, found, size in (
        ("top_k=3", _frequencies(bench, top_k=3, log_probs=False), 3),
        ("top_p=0.6", _frequencies(bench, top_p=0.6, log_probs=False), num_nucleus),
    ):
        drawn = set(found.nonzero()[:, 0].tolist())
        allowed = set(ranked[:size].tolist())
        require(drawn <= allowed, f"{name} drew tokens {sorted(drawn - allowed)}, which are outside its set")
        likely = {token for token in allowed if logp_V[token].exp() > 0.02}  # noqa: PLR2004
        require(likely <= drawn, f"{name} never drew tokens {sorted(likely - drawn)} of its set")


def _frequencies(bench: Bench, **sampling: object) -> torch.Tensor:
    """[V]: how often each token comes first."""
    found = bench.stream().generate(request(PROMPTS[0], *range(NUM_DRAWN), num=1, **sampling))
    counts = Counter(sample.token_ids[0] for sample in found)
    return torch.tensor([counts[token] / NUM_DRAWN for token in range(VOCABULARY)])


def seeds(bench: Bench) -> None:
    """Equal requests give equal tokens whatever runs beside them; other seeds give others."""
    stream = bench.stream()
    many = [request(prompt, seed, num=10 + seed) for seed in range(4) for prompt in PROMPTS]
    together = stream.generate(*many)
    for one, found in list(zip(many, together, strict=True))[::3]:
        [alone] = stream.generate(one)
        require(alone.token_ids == found.token_ids, f"alone {alone.token_ids}, beside others {found.token_ids}")
    first = {tuple(found.token_ids[:10]) for found in together[:: len(PROMPTS)]}
    require(len(first) == len(together[:: len(PROMPTS)]), "two seeds drew the same tokens")
