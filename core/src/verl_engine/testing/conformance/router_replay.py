"""Tokens through given experts, against a mixture that is computed by hand, in one process.

Shape legend: L tokens of one sequence, E experts of a layer, k of them a token, H hidden dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import linear, silu

from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError, EngineError, ModelError, UnsupportedError
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.reference import (
    largest_difference,
    load_reference,
    make_sequences,
    relative_error,
    sequence_log_probs,
)
from verl_engine.testing.tiny_models import EXPERTS_PER_TOKEN, NUM_EXPERTS

TOLERANCE: Final = 1e-5
ROUNDING: Final = 1e-6
FIELD: Final = "routed_experts"


def given(bench: Bench) -> None:
    """Tokens go through the experts that they bring, weighted by the model's router, which gets its gradient."""
    probe = bench.probe("experts", router_replay=True)
    sequences = with_experts(make_sequences(8))
    log_probs, gradient = by_hand(load_reference(bench.model("experts")), sequences)
    worst = largest_difference(probe.driver.infer(sequences), log_probs)
    bench.require(worst <= TOLERANCE, f"through given experts, log-probs are off by {worst:.3g} nats")
    distance = relative_error(by_expert(probe.gradient_of(sequences)), by_expert(gradient))
    bench.require(distance <= TOLERANCE, f"through given experts, the gradient is off by {distance:.3g}")


def said(bench: Bench) -> None:
    """The experts that a forward says are those of the model's router; given back, they change nothing."""
    probe = bench.probe("experts", router_replay=True)
    sequences = make_sequences(8)
    found = probe.driver.outputs(sequences, ("log_probs", FIELD))
    model = load_reference(bench.model("experts"))
    for sequence, outputs in zip(sequences, found, strict=True):
        is_same = torch.equal(outputs[FIELD].long().sort(-1).values, choice_of(model, sequence))
        bench.require(is_same, "the experts said of a forward are not those of the plain model's router")
    replayed = [
        replace(sequence, fields={**sequence.fields, FIELD: outputs[FIELD].numpy()})
        for sequence, outputs in zip(sequences, found, strict=True)
    ]
    worst = largest_difference(probe.driver.infer(replayed), [outputs["log_probs"] for outputs in found])
    distance = relative_error(probe.gradient_of(replayed), probe.gradient_of(sequences))
    bench.require(
        max(worst, distance) <= ROUNDING,
        f"given back, the experts of a forward change log-probs by {worst:.3g} and the gradient by {distance:.3g}",
    )


def refusals(bench: Bench) -> None:
    """Experts that would not be used, or that no layer has, are refused, and so is a model without experts."""
    asked, unasked = bench.driver("experts", router_replay=True), bench.driver("experts")
    sequences = with_experts(make_sequences(4))
    for sequence in sequences:
        sequence.fields[FIELD][0, 0] = (0, NUM_EXPERTS)
    attempts: dict[str, tuple[type[EngineError], Callable[[], object]]] = {
        "experts with router_replay=false": (UnsupportedError, lambda: unasked.infer(sequences)),
        "an expert that is not there": (BatchError, lambda: asked.infer(sequences)),
        "router_replay=true for a model without experts": (ModelError, lambda: bench.driver(router_replay=True)),
    }
    for what, (kind, attempt) in attempts.items():
        message = refusal(kind, attempt) or ""
        bench.require(
            FIELD in message or "router_replay" in message,
            f"{what} must raise a {kind.__name__} that names it; got {message!r}",
        )


def with_experts(sequences: list[Sequence], num_layers: int = 2) -> list[Sequence]:
    """Draw experts for each token and layer; the router chooses for the last token, and for some in between."""
    random = np.random.default_rng(5)
    drawn = []
    for sequence in sequences:
        every = np.broadcast_to(np.arange(NUM_EXPERTS, dtype=np.int16), (len(sequence), num_layers, NUM_EXPERTS))
        experts = random.permuted(every, axis=-1)[..., :EXPERTS_PER_TOKEN].copy()
        experts[random.random(experts.shape[:2]) < 0.2] = -1  # noqa: PLR2004
        experts[-1] = -1
        drawn.append(replace(sequence, fields={**sequence.fields, FIELD: experts}))
    return drawn


def by_hand(model: Any, sequences: list[Sequence]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute log-probs, 0 outside the loss, and the gradient of the global batch, with each layer written out."""
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    found = []
    for sequence in sequences:
        for index, layer in enumerate(model.model.layers):
            layer.mlp.forward = _mixture(layer.mlp, torch.from_numpy(sequence.fields[FIELD][:, index]).long())
        mask = torch.from_numpy(sequence.loss_mask)
        log_probs = sequence_log_probs(model, sequence)
        (-(log_probs * torch.from_numpy(sequence.fields["weight"]))[mask].sum() / num_tokens).backward()
        found.append(torch.where(mask, log_probs.detach(), 0.0))
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


def _mixture(mlp: Any, given_Lk: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden_1LH: torch.Tensor) -> torch.Tensor:
        hidden_LH = hidden_1LH[0]
        probs_LE = linear(hidden_LH, mlp.gate.weight).softmax(-1)
        experts_Lk = torch.where(given_Lk < 0, probs_LE.topk(EXPERTS_PER_TOKEN).indices, given_Lk)
        weights_Lk = probs_LE.gather(1, experts_Lk)
        weights_Lk = weights_Lk / weights_Lk.sum(-1, keepdim=True)
        weights_LE = torch.zeros_like(probs_LE).scatter(1, experts_Lk, weights_Lk)
        outputs = [weights_LE[:, [expert]] * _expert(mlp.experts, expert, hidden_LH) for expert in range(NUM_EXPERTS)]
        return torch.stack(outputs).sum(0)[None]

    return forward


def _expert(experts: Any, number: int, hidden_LH: torch.Tensor) -> torch.Tensor:
    if isinstance(experts, torch.nn.ModuleList):  # transformers 4
        output: torch.Tensor = experts[number](hidden_LH)
        return output
    gate, up = linear(hidden_LH, experts.gate_up_proj[number]).chunk(2, dim=-1)
    return linear(silu(gate) * up, experts.down_proj[number])


def choice_of(model: Any, sequence: Sequence) -> torch.Tensor:
    """Return [L, layers, k] int64: what the plain model's routers choose, in ascending order."""
    chosen: list[torch.Tensor] = []

    def note(_gate: torch.nn.Module, _given: Any, output: Any) -> None:
        logits_LE = output[0] if isinstance(output, tuple) else output
        chosen.append(logits_LE.topk(EXPERTS_PER_TOKEN).indices.sort(-1).values)

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(sequence.token_ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take apart what transformers 5 keeps of all experts in one tensor; other engines export them one by one."""
    found = {}
    for name, tensor in weights.items():
        layer, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            for number, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{layer}.experts.{number}.{part}.weight"] = half
        elif kind == "down_proj":
            found |= {f"{layer}.experts.{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


CHECKS = (
    Check("router_replay/given", (all_ranks(given),), ("router_replay",)),
    Check("router_replay/said", (all_ranks(said),), ("router_replay",)),
    Check("router_replay/refusals", (all_ranks(refusals),), ("router_replay",)),
)
