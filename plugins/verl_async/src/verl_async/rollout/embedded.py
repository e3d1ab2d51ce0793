"""The embedded rollout engine: transformers' model, batched continuously in a thread of the rollout process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from verl_async.errors import RolloutError
from verl_async.rollout.interface import RolloutEngine, RolloutStats
from verl_async.rollout.model_loading import load_model
from verl_async.rollout.positions import max_num_tokens
from verl_async.rollout.reading import find_reading, reader
from verl_async.rollout.request_check import RequestCheck
from verl_async.rollout.routes import RouteRecorder
from verl_async.rollout.running_batch import RunningBatch
from verl_async.rollout.weight_receiver import WeightReceiver
from verl_engine.contract.errors import EngineError, WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.weights.model_folder import ModelFolderWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_async.rollout.embedded_plugin import EmbeddedConfig
    from verl_async.rollout.interface import (
        Acknowledgement,
        Completion,
        GenerationRequest,
        PauseMode,
        WeightTransport,
    )
    from verl_async.rollout.row import Row
    from verl_engine.engine.weights.bucket import WeightBucket

_RECEIVER = "embedded"


class EmbeddedEngine(RolloutEngine):
    """Generates with a key-value cache on any device that torch knows, at the model's own precision.

    Equal requests give equal tokens whatever else is in the batch, up to the rounding of the matrix products, which
    depends on the batch's shape: it moves log-probabilities by about 1e-6 in float32, and changes a token where the
    random number lies that close to a boundary. Sealed requests have the same shapes, and so the same bits, each time.

    One thread owns model and batch. Others leave it requests and the mode, under one condition.
    """

    def __init__(self, config: EmbeddedConfig, model_folder: Path) -> None:
        self.version = 0
        self._model = load_model(model_folder, getattr(torch, config.dtype), Device.resolve(config.device).torch_device)
        recorder = RouteRecorder(self._model) if config.routed_experts else None
        self.reading = find_reading(self._model)
        self._check = RequestCheck(max_num_tokens(self._model.config), config, model_folder)
        self._receiver = WeightReceiver(self._model)
        self._folder_writer = ModelFolderWriter(self._model)
        self._batch = RunningBatch(
            reader(self._model, self.reading, config.max_cache_tokens, recorder),
            config.max_running,
            config.max_cache_tokens,
            mixed_lengths=self.reading in {"slots", "mixed lengths"},
        )
        self._changed = threading.Condition()
        self._inbox: list[tuple[list[list[Row]], bool]] = []
        """Submitted and not yet taken: groups of rows, and whether they are sealed."""
        self._is_sealed = False
        """Whether the batch is."""
        self._done: list[Row] = []
        """Had reached their end when they were submitted."""
        self._mode: PauseMode | None = None
        self._num_before_pause = 0
        """How much of the inbox had come before the pause."""
        self._is_quiet = False
        """Whether the thread has done what the mode asks for, and stays so."""
        self._is_closed = False
        self._has_ended = False
        """Whether every sample was given back, and the thread does nothing more."""
        self._failure: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="embedded rollout engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        """Take requests; a sample that has reached its end already comes back at once."""
        groups = self._check.rows(requests, on_completion)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                raise RolloutError("the rollout engine is closed; nothing can be submitted any more")
            self._inbox.append((groups, sealed))
            self._changed.notify_all()

    def pause(self, mode: PauseMode) -> None:
        """Stop generating between two tokens, or, with ``wait``, when all that was submitted before has ended."""
        assert threading.current_thread() is not self._thread, "the engine's own thread cannot wait for itself"
        with self._changed:
            self._mode, self._is_quiet = mode, False
            self._num_before_pause = len(self._inbox)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_quiet or self._has_ended or self._mode is None)

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            if self._receiver.is_loading:
                raise WeightsError(
                    f"weights were loaded after version {self.version} but not committed; "
                    "load all of them and call commit_weights before resume"
                )
            self._mode, self._is_quiet = None, False
            self._changed.notify_all()

    def close(self) -> None:
        """Give unfinished requests back, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> RolloutStats:
        """Return what the engine is doing."""
        batch = self._batch
        with self._changed:
            waiting = sum(len(group) for groups, _ in self._inbox for group in groups)
        return RolloutStats(
            running=len(batch.rows),
            waiting=waiting + sum(map(len, list(batch.waiting))),
            cache_tokens=batch.num_cache_tokens,
            read_tokens=batch.reader.num_read,
            drawn_tokens=batch.num_drawn,
        )

    def receivers(self) -> tuple[str, ...]:
        """This process alone holds the model."""
        return (_RECEIVER,)

    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """See `WeightReceiver.begin`."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._is_quiet:
                raise WeightsError("begin_weights while the engine generates; call pause first")
            self._receiver.begin(version, plan, transport)

    def load_bucket(self, handle: Any, checksum: int) -> None:
        """See `WeightReceiver.load`."""
        self._receiver.load(handle, checksum)

    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use; frozen samples are read again under them."""
        acknowledgement = self._receiver.commit(version)
        self.version = version
        with torch.inference_mode():
            self._batch.put_back()
        return {_RECEIVER: acknowledgement}

    def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder, and return their dtype."""
        self._folder_writer.write(self._model, self._model.state_dict().items(), folder)
        return str(self._model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def _run(self) -> None:
        """Work until closed; what goes wrong comes back with every sample."""
        failure: EngineError | None = None
        try:
            while self._take_in():
                done, self._done = self._done, []
                for row in (*done, *self._batch.take_turn(self.version)):
                    row.hand_back()
        except EngineError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - a model's code can raise anything
            failure = RolloutError(f"the embedded rollout engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            self._failure, self._is_closed = failure, True
            self._num_before_pause = len(self._inbox)
            rows = self._take_all()
        for row in rows:
            row.hand_back(failure)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _take_in(self) -> bool:
        """Do what others ask for, and wait where nothing is to be done. Returns False once closed."""
        while True:
            with self._changed:
                if self._is_closed:
                    return False
                back = self._take_all() if self._mode == "abort" and not self._is_quiet else []
                if not back:
                    if self._mode in {None, "wait"}:
                        self._admit()
                        if self._batch.rows or self._batch.waiting or self._done:
                            return True
                    if self._mode is not None and not self._is_quiet:
                        self._is_quiet = True
                        self._changed.notify_all()
                    self._changed.wait()
            for row in back:
                row.hand_back()

    def _admit(self) -> None:
        """Let submissions into the batch, in order; what is sealed comes alone."""
        num_allowed = len(self._inbox) if self._mode is None else self._num_before_pause
        while self._inbox and num_allowed:
            groups, sealed = self._inbox[0]
            if (sealed or self._is_sealed) and (self._batch.rows or self._batch.waiting):
                return
            self._inbox.pop(0)
            self._is_sealed = sealed
            num_allowed -= 1
            self._num_before_pause = max(0, self._num_before_pause - 1)
            for group in groups:
                self._done += [row for row in group if row.is_finished()]
                self._batch.add([row for row in group if not row.is_finished()])

    def _take_all(self) -> list[Row]:
        """Take out every sample that came before the pause."""
        taken, self._inbox = self._inbox[: self._num_before_pause], self._inbox[self._num_before_pause :]
        self._num_before_pause = 0
        return [*self._batch.clear(), *(row for groups, _ in taken for group in groups for row in group)]
