"""A rollout engine of a stranger: transformers' `generate`, one request after the other."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from verl_async.config import RolloutConfig
from verl_async.rollout.interface import Completion, Generation, RolloutEngine, RolloutStats
from verl_async.rollout.spec import FEATURES, RolloutSpec
from verl_async.rollout.weight_receiver import WeightReceiver
from verl_engine.contract.errors import ModelError, WeightsError

GAPS = dict.fromkeys([*FEATURES.keys() - {"filtered_log_probs"}], "generate cannot")
SPEC = RolloutSpec("plain_generate", RolloutConfig, f"{__name__}:GenerateEngine", ("cpu",), GAPS, plugin_api_version=2)


class GenerateEngine(RolloutEngine):
    def __init__(self, config: Any, model_folder: Any) -> None:  # noqa: ARG002
        self.version, self._drawn, self._closed = 0, 0, False
        self._error: ModelError | None = None
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        self._receiver = WeightReceiver(self._model)
        self._waiting: list[Any] = []
        self._running: Any = None
        self._mode: Any = None
        self._num_allowed = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, requests: Any, on_completion: Any, *, sealed: bool = False) -> None:  # noqa: ARG002
        with self._changed:
            if self._error or self._closed:
                raise self._error or ModelError("closed")
            for one in requests:
                places = [*range(len(one.seeds))]
                parts = [[place] for place in places] if one.so_far else [places]
                self._waiting += [(one, part, on_completion) for part in parts]
            self._num_allowed = len(self._waiting) if self._mode is None else self._num_allowed
            self._changed.notify_all()

    def pause(self, mode: Any) -> None:
        with self._changed:
            self._mode, self._num_allowed = mode, len(self._waiting)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running and not self._num_allowed)

    def resume(self) -> None:
        if self._receiver.is_loading:
            raise WeightsError("commit first")
        with self._changed:
            self._mode, self._num_allowed = None, len(self._waiting)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self.pause("abort") if self._thread.is_alive() else None

    def stats(self) -> RolloutStats:
        return RolloutStats(int(self._running is not None), len(self._waiting), drawn_tokens=self._drawn)

    def receivers(self) -> tuple[str, ...]:
        return ("generate",)

    def begin_weights(self, version: int, plan: Any, transport: Any) -> None:
        if self._mode is None:
            raise WeightsError("pause first")
        self._receiver.begin(version, plan, transport)

    def load_bucket(self, handle: Any, checksum: int) -> None:
        self._receiver.load(handle, checksum)

    def commit_weights(self, version: int) -> Any:
        found = self._receiver.commit(version)
        self.version = version
        return {"generate": found}

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._num_allowed and self._waiting)
                self._running = self._waiting.pop(0)
                self._num_allowed -= 1
            request, places, on_completion = self._running
            old = [request.so_far[place] if request.so_far else Generation() for place in places]
            found = [Generation([*one.token_ids], [*one.log_probs], [*one.weight_versions]) for one in old]
            try:
                if self._error is None:
                    self._generate(request, found, request.seeds[places[0]])
            except (ModelError, RuntimeError) as error:
                self._error = ModelError(str(error))
            for place, one in zip(places, found, strict=True):
                on_completion(Completion(request, place, one, self._error))

    @torch.inference_mode()
    def _generate(self, request: Any, found: list[Generation], seed: int) -> None:
        sampling, num_before = request.sampling, len(found[0].token_ids)

        def stop(ids: torch.Tensor, _: Any) -> torch.Tensor:
            self._drawn += len(ids)
            stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64)
            is_stop: torch.Tensor = torch.isin(ids[:, -1], stops)
            return is_stop | bool(self._mode == "abort")

        if num_before < sampling.max_new_tokens and self._mode != "abort":
            torch.manual_seed(seed + num_before)
            how = {"do_sample": False} if sampling.temperature == 0 else {
                "do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p
            }  # fmt: skip
            ids = torch.tensor([[*request.prompt_ids, *one.token_ids] for one in found])
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_new_tokens - num_before,
                pad_token_id=0, output_logits=True, stopping_criteria=StoppingCriteriaList([stop]),
                return_dict_in_generate=True, **how,
            )  # fmt: skip
            logp_TBV = (torch.stack(out.logits) / (sampling.temperature or 1.0)).log_softmax(-1)
            if not logp_TBV.isfinite().all():
                raise ModelError("log-probs are not finite")
            for row, one in enumerate(found):
                tokens = out.sequences[row, ids.shape[1] :].tolist()
                ends = [place + 1 for place, token in enumerate(tokens) if token in sampling.stop_token_ids]
                tokens = tokens[: min(ends, default=len(tokens))]
                one.token_ids += tokens
                one.weight_versions += [self.version] * len(tokens)
                if request.log_probs:
                    one.log_probs += [float(logp_TBV[place, row, token]) for place, token in enumerate(tokens)]
        for one in found:
            is_stop = one.token_ids and one.token_ids[-1] in sampling.stop_token_ids
            is_full = len(one.token_ids) >= sampling.max_new_tokens
            one.finish_reason = "stop" if is_stop else "length" if is_full else "interrupted"
