"""What each architecture goes through. The truth is transformers' own model with eager attention, sequence by sequence.

Shape legend: L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping
from tests.zoo.architectures import write
from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import InlineTransport, generate
from verl_async.rollout.interface import GenerationRequest, SamplingParams
from verl_engine import EngineError, EngineWorker, Sequence, validate_engine_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.token_output import TokenOutput

T = TypeVar("T")
State = Literal["right", "refused", "wrong", "crashed"]
LENGTHS: Final = (9, 5, 20, 9, 14)
PROMPT_LENGTHS: Final = (3, 11, 3, 7, 1)
NUM_NEW: Final = 10
LOG_PROB_TOLERANCE: Final = 2e-4
GRADIENT_TOLERANCE: Final = 1e-3
"""Of the largest entry of each weight's gradient."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check of one architecture ended."""

    state: State
    detail: str = ""
    """The reason; for what is right, in which way where it is not the usual one."""


class WrongError(AssertionError):
    """Something else came out than transformers computes."""


class RefusedError(Exception):
    """The engine, or the rollout engine, said when it was built that it cannot do this; the message is its own."""


class Subject:
    """One architecture's model folder, and the truth about it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / "model"
        self.scratch = folder
        write(name, self.folder)

    @cached_property
    def truth(self) -> PreTrainedModel:
        """Transformers' model, in evaluation mode."""
        return load(self.folder)

    @cached_property
    def sequences(self) -> list[Sequence]:
        """Sequences of mixed lengths; all but the first token of each is in the loss."""
        rng = np.random.default_rng(0)
        return [Sequence(rng.integers(3, 60, length), np.arange(length) > 0) for length in LENGTHS]

    def log_probs(self, token_ids: Any) -> torch.Tensor:
        """[L - 1] of each token but the first."""
        ids = torch.as_tensor(token_ids)[None]
        logits = self.truth(input_ids=ids, use_cache=False).logits[0].float()
        found: torch.Tensor = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return found

    @cached_property
    def right_log_probs(self) -> list[torch.Tensor]:
        """Of `sequences`."""
        with torch.no_grad():
            return [self.log_probs(sequence.token_ids) for sequence in self.sequences]

    @cached_property
    def right_gradient(self) -> dict[str, torch.Tensor]:
        """Of minus the mean log-prob of all loss tokens."""
        self.truth.zero_grad()
        sum(self.log_probs(sequence.token_ids).sum() for sequence in self.sequences).neg().backward()  # type: ignore[union-attr]
        count = sum(LENGTHS) - len(LENGTHS)
        return {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad / count
            for name, weight in self.truth.named_parameters()
        }


def load(folder: Path) -> PreTrainedModel:
    """Load a folder as transformers does, and nothing else."""
    loading: Any = AutoModelForCausalLM  # it returns two things where info is asked for
    model, info = loading.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    lost = {kind: sorted(names) for kind, names in info.items() if names}
    require(not lost, f"what the folder holds does not fit: {lost}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def check_packed(subject: Subject) -> str:
    """Log-probs and gradient with sequences end to end, or as the engine thinks right."""
    return "" if _check_training(subject, packing=True) else "in rows"


def check_padded(subject: Subject) -> str:
    """Log-probs and gradient with one sequence per row."""
    _check_training(subject, packing=False)
    return ""


def _check_training(subject: Subject, **settings: Any) -> bool:
    """Return whether sequences were packed."""
    with worker_of(subject, **settings) as worker:
        found = worker.infer_batch([subject.sequences])[0]
        for own, right in zip(found, subject.right_log_probs, strict=True):
            close(torch.as_tensor(own[1:]), right, "log-probs")
        engine: Any = worker.engine
        gradients = look_instead_of_stepping(engine)
        worker.train_batch([subject.sequences[:2], subject.sequences[2:]], negative_log_probs)
        largest = max(float(right.abs().max()) for right in subject.right_gradient.values())
        for name, right in subject.right_gradient.items():
            own_gradient = gradients[0].get(name)
            size = float(right.abs().max())
            difference = size if own_gradient is None else float((own_gradient - right).abs().max())
            within = difference <= GRADIENT_TOLERANCE * max(size, 0.01 * largest)
            require(within, f"gradient of {name} is off by {difference:.1e} of {size:.1e}")
        return bool(engine.model_forward.is_packed)


def check_saved(subject: Subject) -> str:
    """What is saved untrained is the base, bit for bit, to transformers itself."""
    with worker_of(subject) as worker:
        _check_saves_base(subject, worker)
    return ""


def check_lora(subject: Subject) -> str:
    """Untrained adapters change nothing: neither log-probs nor what is saved."""
    with worker_of(subject, lora={"rank": 2}) as worker:
        for own, right in zip(worker.infer_batch([subject.sequences])[0], subject.right_log_probs, strict=True):
            close(torch.as_tensor(own[1:]), right, "log-probs under an untrained adapter")
        _check_saves_base(subject, worker)
    return ""


def _check_saves_base(subject: Subject, worker: EngineWorker) -> None:
    folder = subject.scratch / "saved"
    shutil.rmtree(folder, ignore_errors=True)
    worker.save_pretrained(folder)
    saved, base = load(folder), subject.truth
    require(saved.config.to_json_string() == base.config.to_json_string(), "the saved config differs")
    own = saved.state_dict()
    differing = [name for name, weight in base.state_dict().items() if not torch.equal(own[name], weight)]
    require(not differing, f"saved weights differ: {differing[:5]}")


def check_rollout(subject: Subject) -> str:
    """Prompts of mixed lengths in one batch: each token's log-prob is the full forward's, and a batch equals alone."""
    engine = built(lambda: EmbeddedEngine(EmbeddedConfig(device="cpu"), subject.folder))
    rng = np.random.default_rng(1)
    prompts = [tuple(map(int, rng.integers(3, 60, length))) for length in PROMPT_LENGTHS]
    prompts.append(prompts[0])
    # Of different lengths, so that rows leave the batch at different times.
    requests = [GenerationRequest(p, SamplingParams(NUM_NEW - i), seeds=(i,)) for i, p in enumerate(prompts)]
    together = generate(engine, requests)
    for request, found in zip(requests, together, strict=True):
        with torch.no_grad():
            right = subject.log_probs((*request.prompt_ids, *found.token_ids))[len(request.prompt_ids) - 1 :]
        close(torch.tensor(found.log_probs), right, f"log-probs after a prompt of {len(request.prompt_ids)}")
    alone = generate(engine, [requests[2]])[0]
    require(alone.token_ids == together[2].token_ids, "a request draws other tokens alone than in a batch")
    return "" if engine.reading == "slots" else engine.reading


def check_sync(subject: Subject) -> str:
    """Weights that were not trained, sent in bfloat16, leave the rollout model as it was."""
    rollout = built(lambda: EmbeddedEngine(EmbeddedConfig(device="cpu", dtype="bfloat16"), subject.folder))
    request = GenerationRequest(tuple(map(int, subject.sequences[2].token_ids)), SamplingParams(4), seeds=(0,))
    before = generate(rollout, [request])[0]
    with worker_of(subject, param_dtype="bfloat16") as worker:
        plan = worker.plan_weight_buckets(2**24, "bfloat16")
        rollout.pause("wait")
        rollout.begin_weights(1, plan, InlineTransport())
        for bucket in plan:
            buffer = np.zeros(bucket.num_bytes, np.uint8)
            rollout.load_bucket(buffer, worker.write_weight_bucket(bucket, buffer))
    rollout.commit_weights(1)
    rollout.resume()
    after = generate(rollout, [request])[0]
    require(before.log_probs == after.log_probs, f"log-probs {before.log_probs} became {after.log_probs}")
    return ""


CHECKS: Final[dict[str, Callable[[Subject], str]]] = {
    "packed": check_packed,
    "padded": check_padded,
    "saved": check_saved,
    "lora": check_lora,
    "rollout": check_rollout,
    "sync": check_sync,
}


def examine(name: str) -> dict[str, Outcome]:
    """Put one architecture through all checks."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(name, Path(folder))
        return {check: _outcome(run, subject) for check, run in CHECKS.items()}


def _outcome(run: Callable[[Subject], str], subject: Subject) -> Outcome:
    try:
        return Outcome("right", run(subject))
    except RefusedError as error:
        return Outcome("refused", str(error).replace(str(subject.folder), "FOLDER"))
    except WrongError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 - that is what is counted
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("crashed", f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}")


@contextmanager
def worker_of(subject: Subject, **settings: Any) -> Iterator[EngineWorker]:
    """Build fsdp2 in this process."""
    section = {"backend": "fsdp2", "device": "cpu", "learning_rate": 1e-6, "max_grad_norm": 1e9} | settings
    worker = EngineWorker(validate_engine_section(section), subject.folder)
    with tempfile.TemporaryDirectory() as folder:
        worker.prepare(f"file://{folder}/store")
        try:
            built(worker.create)
            yield worker
        finally:
            worker.close()


def built(build: Callable[[], T]) -> T:
    """Build an engine; what it refuses now counts as a refusal, later as a crash."""
    try:
        return build()
    except EngineError as error:
        raise RefusedError(str(error)) from error


def negative_log_probs(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum minus log-probs over the loss tokens."""
    return -output.log_probs[batch.loss_mask].sum(), {}


def close(own: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """Compare log-probs."""
    difference = float((own - right).abs().max())
    require(difference <= LOG_PROB_TOLERANCE, f"{what} off by {difference:.1e}")


def require(condition: bool, text: str) -> None:
    """Raise WrongError unless the condition holds."""
    if not condition:
        raise WrongError(text)
