"""The embedded rollout engine: transformers' model, and a decode loop of our own, inside the rollout process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from verl_async.rollout.decoding import context_of, decode
from verl_async.rollout.interface import FinishReason, Generation, RolloutEngine
from verl_async.rollout.model_loading import load_model
from verl_async.rollout.positions import max_num_tokens
from verl_async.rollout.reading import find_reading
from verl_async.rollout.weight_receiver import WeightReceiver
from verl_engine.contract.errors import ConfigError, ModelError, WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.weights.model_folder import ModelFolderWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from verl_async.config import RolloutConfig
    from verl_async.rollout.interface import GenerationRequest


class EmbeddedEngine(RolloutEngine):
    """Generates in batches with a key-value cache on any device that torch knows, at the model's own precision.

    Equal requests give equal tokens whatever else is in the batch, up to the rounding of the matrix products, which
    depends on the batch's shape: it moves log-probabilities by about 1e-6 in float32, and changes a token where the
    random number lies that close to a boundary.

    `interrupt` belongs to the `generate` that is running: each `generate` starts by forgetting earlier calls. So one
    that was handed to a thread but has not begun is not stopped; a caller who must be sure that nothing runs starts no
    new calls first, then calls `interrupt` again and again until the last one has returned.
    """

    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        self.version = 0
        self._model = load_model(model_folder, getattr(torch, config.dtype), Device.resolve(config.device).torch_device)
        self.reading = find_reading(self._model)
        self._max_num_tokens = max_num_tokens(self._model.config)
        self._receiver = WeightReceiver(self._model)
        self._folder_writer = ModelFolderWriter(self._model)
        self._interrupted = threading.Event()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate all requests as one batch, or those of one length after the other; see `reading`.

        A request that has reached its end already, by a stop token or by its length, comes back at once. One with
        tokens so far is read anew under the current weights; its old tokens keep their log-probabilities and versions.

        Returns:
            One generation a request, in order; the ``so_far`` of the requests are not changed.
        Raises:
            ConfigError: a prompt is empty, or longer with its answer than the model's positions; nothing was started.
            WeightsError: weights were loaded, but not committed.
            ModelError: the model's logits are not finite.
        """
        self._interrupted.clear()
        self._check(requests)
        results = [_copy(request.so_far) for request in requests]
        unfinished = [
            i
            for i, (request, result) in enumerate(zip(requests, results, strict=True))
            if _finish_reason(request, result) == "interrupted"
        ]
        for group in self._batches(requests, unfinished):
            transcript = decode(self._model, [requests[i] for i in group], self._interrupted, self.reading)
            for i, (token_ids, log_probs) in zip(group, transcript.by_row(), strict=True):
                results[i].token_ids += token_ids
                results[i].log_probs += log_probs
                results[i].weight_versions += [self.version] * len(token_ids)
            if not transcript.is_finite():
                raise ModelError(
                    f"the rollout model's log-probabilities are not finite under weights of version {self.version}; "
                    "training has diverged, or rollout.dtype is too narrow for this model"
                )
        for request, result in zip(requests, results, strict=True):
            result.finish_reason = _finish_reason(request, result)
        return results

    def _batches(self, requests: Sequence[GenerationRequest], unfinished: list[int]) -> list[list[int]]:
        """Divide requests into what the model can read at once, in order; none where nothing is left."""
        by_length: dict[int, list[int]] = {}
        for i in unfinished:
            length = 0 if self.reading == "mixed lengths" else len(context_of(requests[i]))
            by_length.setdefault(length, []).append(i)
        return list(by_length.values())

    def interrupt(self) -> None:
        """Make a running `generate` return after its current token. Thread-safe; without effect when idle."""
        self._interrupted.set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors, in Hugging Face names, into the model; see `WeightReceiver.load`."""
        self._receiver.load(weights)

    def commit_weights(self, version: int) -> None:
        """Check that every weight was loaded since the last commit; then `version` is in force.

        Raises:
            WeightsError: weights are missing, which are named; the version stays, and the rest may still be loaded.
        """
        self._receiver.commit()
        self.version = version

    def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder, and return their dtype."""
        self._folder_writer.write(self._model, self._model.state_dict().items(), folder)
        return str(self._model.dtype).removeprefix("torch.")

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        if self._receiver.is_loading:
            raise WeightsError(
                f"weights were loaded after version {self.version} but not committed; "
                "load all of them and call commit_weights before generate"
            )
        for i, request in enumerate(requests):
            num_prompt, num_new = len(request.prompt_ids), request.sampling.max_new_tokens
            if num_prompt == 0:
                raise ConfigError(f"requests[{i}].prompt_ids is empty; a prompt needs at least one token, such as BOS")
            if self._max_num_tokens is not None and num_prompt + num_new > self._max_num_tokens:
                raise ConfigError(
                    f"rollout.max_response_tokens={num_new} after a prompt of {num_prompt} tokens (requests[{i}]) "
                    f"makes {num_prompt + num_new} tokens; the model has positions for {self._max_num_tokens} "
                    "(max_position_embeddings): lower rollout.max_response_tokens or data.max_prompt_tokens"
                )


def _copy(so_far: Generation | None) -> Generation:
    """Copy what was generated so far, as the caller keeps the original."""
    if so_far is None:
        return Generation()
    return Generation(list(so_far.token_ids), list(so_far.log_probs), list(so_far.weight_versions))


def _finish_reason(request: GenerationRequest, result: Generation) -> FinishReason:
    """Tell from the tokens whether a generation is at its end."""
    if result.token_ids and result.token_ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    if len(result.token_ids) >= request.sampling.max_new_tokens:
        return "length"
    return "interrupted"
