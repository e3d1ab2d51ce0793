"""Rollout engines that are wrong in one way each; `MUTANTS` says which check of the kit each fails."""

from __future__ import annotations

import copy
import itertools
import shutil
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch

from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.interface import Acknowledgement
from verl_async.rollout.spec import RolloutSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_async.rollout.interface import Completion, GenerationRequest, PauseMode, WeightTransport
    from verl_engine.engine.weights.bucket import WeightBucket

MUTANTS: Final[dict[str, tuple[type[Mutant], str, str]]] = {}
"""By name: the class, the check that it fails, and part of the reason."""


class Mutant(EmbeddedEngine):
    """Right, but for what a subclass changes."""

    SPEC: ClassVar[RolloutSpec]
    gaps: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, fails: str = "", says: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in cls.__name__).strip("_")
        cls.SPEC = RolloutSpec(name, EmbeddedConfig, f"{__name__}:{cls.__name__}", ("cpu",), cls.gaps)
        MUTANTS[name] = (cls, fails, says)

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return request

    def came(self, completion: Completion) -> Completion:
        return completion

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        own = [replace(request, request_id=str(place)) for place, request in enumerate(map(self.asked, requests))]

        def deliver(completion: Completion) -> None:
            original = requests[int(completion.request.request_id)]
            on_completion(replace(self.came(completion), request=original))

        super().submit(own, deliver, sealed=sealed)


def with_sampling(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, **changes))


class LogProbsShifted(Mutant, fails="log_probs/temperature_one", says="is off by 0.01"):
    def came(self, completion: Completion) -> Completion:
        completion.generation.log_probs[:] = [one + 0.01 for one in completion.generation.log_probs]
        return completion


class TemperatureIgnored(Mutant, fails="log_probs/temperatures", says="at temperature 0.5"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, temperature=min(request.sampling.temperature, 1) and 1.0)


class TemperatureIgnoredInDraws(Mutant, fails="sampling/distribution", says="total variation distance"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, temperature=1.0)


class GreedySampled(Mutant, fails="log_probs/greedy", says="are the likeliest"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, temperature=request.sampling.temperature or 1.0)


class Renormalised(Mutant, fails="log_probs/filtered", says="is off by"):
    def came(self, completion: Completion) -> Completion:
        if completion.request.sampling.top_k or completion.request.sampling.top_p < 1:
            completion.generation.log_probs[:] = [one / 2 for one in completion.generation.log_probs]
        return completion


class GapNotRefused(Mutant, fails="log_probs/filtered", says="a declared gap, but a request for them is taken"):
    gaps: ClassVar[Mapping[str, str]] = {"filtered_log_probs": "says so"}


class AlwaysLogProbs(Mutant, fails="log_probs/not_wanted", says="got 12 log-probs"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, log_probs=True)


class FilterIgnored(Mutant, fails="sampling/top_k_top_p", says="outside its set"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, top_k=0, top_p=1.0)


class FilterTooNarrow(Mutant, fails="sampling/top_k_top_p", says="never drew"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, top_k=min(request.sampling.top_k, 1))


class SeedsByOrder(Mutant, fails="sampling/seeds", says="beside others"):
    count = itertools.count()

    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, seeds=tuple(next(self.count) for _ in request.seeds))


class OneTokenLess(Mutant, fails="requests/lengths", says="for 1, 7, 40 and 0 tokens came"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, max_new_tokens=max(0, request.sampling.max_new_tokens - 1))


class StopTokenDropped(Mutant, fails="requests/stop_tokens", says="with stop token"):
    def came(self, completion: Completion) -> Completion:
        if completion.generation.finish_reason == "stop":
            completion.generation.token_ids.pop()
        return completion


class StopStringsIgnored(Mutant, fails="requests/stop_strings", says="with stop string"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return with_sampling(request, stop_strings=())


class FirstSeedForAll(Mutant, fails="requests/samples", says="of different seeds are equal"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, seeds=request.seeds[:1] * len(request.seeds))


class IndexLost(Mutant, fails="requests/samples", says="samples came as"):
    def came(self, completion: Completion) -> Completion:
        return replace(completion, index=0)


class GivenTwice(Mutant, fails="requests/many", says="came twice"):
    def submit(self, requests: Any, on_completion: Any, *, sealed: bool = False) -> None:
        def twice(completion: Completion) -> None:
            on_completion(completion)
            on_completion(completion)

        super().submit(requests, twice, sealed=sealed)


class GivenTogether(Mutant, fails="requests/one_by_one", says="when the long one was finished too"):
    def submit(self, requests: Any, on_completion: Any, *, sealed: bool = False) -> None:
        held: list[Completion] = []

        def hold(completion: Completion) -> None:
            held.append(completion)
            if len(held) == sum(len(request.seeds) for request in requests):
                for one in held:
                    on_completion(one)

        super().submit(requests, hold, sealed=sealed)


class PromptReadForEach(Mutant, fails="requests/group_prompt", says="tokens were read for 8 samples"):
    def __init__(self, config: EmbeddedConfig, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        self._batch.max_running = 1


class LengthCountsAnew(Mutant, fails="requests/so_far", says="came ["):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        done = len(request.so_far[0].token_ids) if request.so_far else 0
        return with_sampling(request, max_new_tokens=request.sampling.max_new_tokens + done)


class SealedIgnored(Mutant, fails="requests/sealed", says="differ beside others"):
    def submit(self, requests: Any, on_completion: Any, *, sealed: bool = False) -> None:
        del sealed
        super().submit(requests, on_completion)


class AffinityIgnored(Mutant, fails="requests/next_turn", says="were read again"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, affinity_key="")


class ExpertsShifted(Mutant, fails="routes/read", says="under version 0, went through"):
    def came(self, completion: Completion) -> Completion:
        experts = completion.generation.routed_experts
        if experts is not None:
            completion.generation.routed_experts = np.roll(experts, -1, axis=0)
        return completion


class ExpertsFromTheFirst(Mutant, fails="routes/read", says="not as uint8 or int16 [17, 2, 2]"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return request if request.routed_experts_from is None else replace(request, routed_experts_from=0)


class ExpertsOfTheRest(Mutant, fails="routes/goes_on", says="not as uint8 or int16 [102, 2, 2]"):
    def came(self, completion: Completion) -> Completion:
        found = completion.generation
        if found.routed_experts is not None and completion.request.so_far:
            old = completion.request.so_far[completion.index].routed_experts
            found.routed_experts = found.routed_experts[len([] if old is None else old) :]
        return completion


class ConversationWithOtherExperts(Mutant, fails="routes/goes_on", says="went through"):
    def __init__(self, config: EmbeddedConfig, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        add = self._batch.parked.add

        def add_other(key: str, token_ids: Any, layers: Any, experts: Any = None) -> None:
            add(key, token_ids, layers, None if experts is None else experts[::-1])

        self._batch.parked.add = add_other  # type: ignore[method-assign]


class OldExpertsReadAnew(Mutant, fails="routes/over_update", says="under version 0, went through"):
    def asked(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, so_far=tuple(replace(one, routed_experts=None) for one in request.so_far))


class LastExpertsKept(Mutant, fails="routes/over_update", says="under version 2, went through"):
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        for row in self._batch.rows:
            if row.routes is not None:
                row.routes.cut = lambda end: None  # type: ignore[method-assign]  # noqa: ARG005
        return super().commit_weights(version)


class AbortWaits(Mutant, fails="pauses/abort", says="it went on to"):
    def pause(self, mode: PauseMode) -> None:
        super().pause("wait" if mode == "abort" else mode)


class AbortLosesTokens(Mutant, fails="pauses/abort", says="samples came back with [0, 0, 0, 0]"):
    def came(self, completion: Completion) -> Completion:
        if completion.generation.finish_reason == "interrupted":
            completion.generation.token_ids.clear()
        return completion


class AbortWhenDrained(AbortWaits, fails="pauses/at_once", says="all samples were finished first"):
    pass


class KeepGoesOn(Mutant, fails="pauses/keep", says=""):
    def pause(self, mode: PauseMode) -> None:
        if mode != "keep":
            super().pause(mode)


class KeepAborts(Mutant, fails="pauses/keep", says="completions came that nobody asked for"):
    def pause(self, mode: PauseMode) -> None:
        super().pause("abort" if mode == "keep" else mode)


class WaitAborts(Mutant, fails="pauses/wait", says="a sample ended with"):
    def pause(self, mode: PauseMode) -> None:
        super().pause("abort" if mode == "wait" else mode)


class SubmitResumes(Mutant, fails="pauses/idle", says="completions came"):
    def submit(self, requests: Any, on_completion: Any, *, sealed: bool = False) -> None:
        super().submit(requests, on_completion, sealed=sealed)
        self.resume()


class BytesNotUsed(Mutant, fails="weights/used", says="is off by"):
    def load_bucket(self, handle: Any, checksum: int) -> None:
        held = {name: target.clone() for name, target in self._receiver._targets.items()}
        super().load_bucket(handle, checksum)
        with torch.no_grad():
            for name, target in self._receiver._targets.items():
                target.copy_(held[name])


class ChecksumMadeUp(Mutant, fails="weights/used", says="was sent"):
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        super().commit_weights(version)
        return {"embedded": Acknowledgement(version, 0)}


class VersionOfTheEnd(Mutant, fails="weights/version_per_token", says="all tokens are of version 1"):
    def came(self, completion: Completion) -> Completion:
        versions = completion.generation.weight_versions
        versions[:] = [self.version] * len(versions)
        return completion


class FrozenCacheKept(Mutant, fails="weights/keep_over_update", says="is off by"):
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        found = self._receiver.commit(version)
        self.version = version
        return {"embedded": found}


class ConversationKept(Mutant, fails="weights/cache_is_dropped", says="is off by"):
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        parked = copy.copy(self._batch.parked)
        parked._entries = list(parked._entries)
        found = super().commit_weights(version)
        self._batch.parked = parked
        return found


class TieBroken(Mutant, fails="weights/tied", says="is off by"):
    def __init__(self, config: EmbeddedConfig, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        head: Any = self._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


class CommitsTooEarly(Mutant, fails="weights/incomplete", says="before the last bucket raises no"):
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        missing = len(self._receiver._plan) - len(self._receiver._checksums)
        self._receiver._checksums += [0] * missing
        return super().commit_weights(version)


class AnyBytes(Mutant, fails="weights/wrong", says="another checksum raises no"):
    def load_bucket(self, handle: Any, checksum: int) -> None:
        del checksum
        super().load_bucket(handle, zlib.crc32(handle.data))


class DoublesTaken(Mutant, fails="weights/doubled", says="comes twice raises no"):
    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        super().begin_weights(version, list(dict.fromkeys(plan)), transport)
        self._receiver._plan = plan


class WeightsAtAnyTime(Mutant, fails="weights/only_paused", says="without a pause raises no"):
    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        self.pause("abort")
        super().begin_weights(version, plan, transport)


class CloseWaits(Mutant, fails="ends/close_in_generation", says="it went on to the end"):
    def close(self) -> None:
        if self._thread.is_alive():
            self.pause("wait")
        super().close()


class SavesWhatItLoaded(Mutant, fails="weights/save_pretrained", says="differ from those that were sent"):
    def save_pretrained(self, folder: Path) -> str:
        shutil.copytree(self._check._folder, folder, dirs_exist_ok=True)
        return "float32"


class DiesWithoutSayingSo(Mutant, fails="ends/dies", says="without an error"):
    def came(self, completion: Completion) -> Completion:
        return replace(completion, error=None)
