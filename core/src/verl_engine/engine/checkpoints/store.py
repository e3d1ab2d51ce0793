"""A folder of checkpoints: one driver for all engines, which writes in the background from a copy of the state."""

import json
import logging
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import StuckError, WeightsError
from verl_engine.contract.kinds import BACKEND
from verl_engine.engine.base import Engine
from verl_engine.engine.checkpoints import folders
from verl_engine.engine.checkpoints.digests import describe_files
from verl_engine.engine.checkpoints.manifest import (
    MODEL_FOLDER,
    CheckpointManifest,
    SavedAdapters,
    check_user_state,
    copy_model_files,
)
from verl_engine.engine.checkpoints.ranks import CheckpointRanks
from verl_engine.engine.checkpoints.reader import CheckpointReader
from verl_engine.engine.checkpoints.rng_state import restore_rng, rng_state, seed_anew
from verl_engine.engine.checkpoints.writer import (
    CheckpointPlanner,
    CheckpointWriter,
    StagingMemory,
    plan_checkpoint,
    saved_weights,
)
from verl_engine.host.catalog import origin_of

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What was loaded."""

    step: int
    user_state: dict[str, Any]
    """As it was given to `CheckpointStore.save`."""
    world_size: int
    """Number of ranks that saved it."""
    rng: str
    """``restored``, or ``seeded anew`` where the number of ranks is another one."""


@dataclass(frozen=True, slots=True)
class _Job:
    step: int
    config: EngineConfig
    planner: CheckpointPlanner
    contents: tuple[str, ...]
    user_state: dict[str, Any]
    keep_last: int | None


class CheckpointStore:
    """Saves and loads the state of an engine; every rank makes the same calls in the same order."""

    def __init__(
        self, root: Path, *, keep_last: int | None = None, model_folder: Path | None = None, timeout_s: float = 1800.0
    ) -> None:
        """Nothing is read or written yet. Collectives: those of a new group of all ranks.

        Args:
            root: the folder that holds the checkpoints, the same for every rank, on storage that all ranks see.
            keep_last: how many to keep; older ones are deleted after a new one is whole. None keeps all.
            model_folder: its config and tokenizer files are kept in each checkpoint, for exports.
            timeout_s: how long ranks wait for each other, and for a write that is under way.
        """
        self.root = root
        self.keep_last = keep_last
        self._model_folder = model_folder
        self._ranks = CheckpointRanks(timeout_s)
        self._memory = StagingMemory()
        self._writing: threading.Thread | None = None
        self._claim: int | None = None
        self._step = 0
        self._failure: Exception | None = None

    def save(self, engine: Engine, step: int, user_state: dict[str, Any] | None = None, *, wait: bool = False) -> None:
        """Write a checkpoint.

        The caller waits for the one before, and while the state is copied; then training may go on.
        Args:
            engine: between two steps.
            step: how many were made; names the checkpoint.
            user_state: what else the job needs to go on, such as its position in the data, as JSON; the same on every
                rank.
            wait: return only when it is whole, and make no copy.
        Raises:
            WeightsError: this one, or the one before (the cause is chained), cannot be written. Others are as they
                were.
            ConfigError: the user state would not come back from JSON as it is, or a number is too low or no integer.
            StuckError: a rank did not come in time; names it.
        Collectives: in a group of their own; those of the engine's ``state_dict``.
        """
        self.wait()
        step = folders.as_count("step", step)
        keep_last = None if self.keep_last is None else folders.as_count("keep_last", self.keep_last, least=1)
        state_json = check_user_state({} if user_state is None else user_state)
        self._begin(step, state_json)
        try:
            state = {**engine.state_dict(), "rng": {f"rank-{self._ranks.rank}": (rng_state(engine.device),)}}
            planner = plan_checkpoint(state, self._ranks)
            if not wait:
                planner.stage(self._memory)
                engine.device.synchronize()  # copies from an accelerator are complete
        except BaseException:
            if self._ranks.is_first:
                folders.clear_remains(self.root)
            self._release()
            raise
        job = _Job(step, engine.config, planner, tuple(state), json.loads(state_json), keep_last)
        if wait:
            self._write(job)
            self.wait()
            return
        self._step = step
        self._writing = threading.Thread(target=self._write, args=(job,), name=f"checkpoint of step {step}")
        self._writing.start()

    def wait(self) -> None:
        """Wait until what is being written is whole.

        Raises:
            WeightsError: it could not be written; the cause is chained. Raised once, by the first call after it.
            StuckError: it takes longer than the time limit, or a rank did not come in time.
        """
        if self._writing is not None:
            self._writing.join(self._ranks.patience_s)
            if self._writing.is_alive():
                raise StuckError(
                    f"rank {self._ranks.rank} still writes the checkpoint of step {self._step} to {self.root} after "
                    f"{self._ranks.patience_s:g} s; is its storage stuck?"
                )
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            kind = StuckError if isinstance(failure, StuckError) else WeightsError
            raise kind(f"no checkpoint was written, those before it are as they were: {failure}") from failure

    def steps(self) -> list[int]:
        """List the steps of all whole checkpoints, lowest first. No collectives."""
        return folders.whole_steps(self.root)

    def latest(self) -> int | None:
        """Return the step of the newest whole checkpoint, if there is one. No collectives."""
        return next(reversed(self.steps()), None)

    def load(self, engine: Engine, step: int | None = None) -> CheckpointInfo:
        """Resume from a checkpoint, on as many ranks as now are.

        On the number of ranks that saved it, each rank's random numbers go on as they would have; on another number
        they are seeded anew from seed, step and rank.

        Args:
            engine: made from the same model; its backend may be another one.
            step: which; by default the newest.
        Raises:
            WeightsError: there is none, it is damaged or of another version or model (nothing was loaded), or reading
                failed on the way (the engine is not fit for use then).
            ConfigError: `step` is no integer of 0 or more.
            StuckError: a rank did not come in time.
        Collectives: in a group of their own; those of the engine's ``state_dict`` and ``load_state_dict``.
        """
        self.wait()
        step = self._choose(None if step is None else folders.as_count("step", step))
        doing = f"loading the checkpoint of step {step}"
        state = engine.state_dict()
        manifest, reader = self._opened(engine, state, step, doing)
        own = f"rank-{self._ranks.rank}"
        rng: dict[str, Any] = {"rng": {own: None}} if manifest.world_size == self._ranks.size else {}
        engine.note_weights_changed()  # also where reading fails on the way
        with self._ranks.together(f"{doing} failed on the way, the engine holds a part of it"):
            reader.read(state)
            reader.read(rng)
        engine.load_state_dict(state)
        if rng:
            restore_rng(rng["rng"][own][0], engine.device)
        else:
            seed_anew(engine.config.seed, step, self._ranks.rank)
            was, now = manifest.world_size, self._ranks.size
            _log.info("step %d was saved by %d ranks, these are %d: random numbers are seeded anew", step, was, now)
        how = "restored" if rng else "seeded anew"
        return CheckpointInfo(step, manifest.user_state, manifest.world_size, how)

    def remove(self, step: int) -> None:
        """Delete a checkpoint, such as one of a run that is given up. Collectives: one.

        Raises:
            WeightsError: there is none of this step, on some rank.
            ConfigError: `step` is no integer of 0 or more.
        """
        step = folders.as_count("step", step)
        self.wait()
        with self._ranks.together(f"removing the checkpoint of step {step}"):
            if self._ranks.is_first:
                if not folders.step_folder(self.root, step).exists():  # a half copied one may be removed too
                    folders.find_step(self.root, step)
                folders.delete(self.root, step)

    def close(self) -> None:
        """Wait for what is being written, then give up the group. Harmless when called twice."""
        try:
            self.wait()
        finally:
            self._ranks.close()

    def _begin(self, step: int, state_json: str) -> None:
        doing = f"the checkpoint of step {step}"
        told = self._ranks.gather((step, state_json), doing)
        try:
            with self._ranks.together(doing):
                _require_equal(told)
                if self._ranks.is_first:
                    self._claim = folders.claim(self.root)
                    folders.make_partial(self.root, step)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            folders.release(claim)

    def _write(self, job: _Job) -> None:
        """Write and publish; keeps a failure for the next call, since in a thread nobody would see it."""
        doing = f"the checkpoint of step {job.step}"
        partial = folders.partial_folder(self.root, job.step)
        try:
            writer = CheckpointWriter(partial, job.planner, self._ranks, doing)
            writer.write()
            with self._ranks.together(f"{doing}, publishing it"):
                if self._ranks.is_first:
                    self._publish(job, writer)
                    self._delete_old(job)  # before the others go on: all see the same list
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be told
            self._failure = error
            _log.error("%s was not written: %s", doing, error)  # the next call raises it, with its cause
            if self._ranks.is_first and not isinstance(error, StuckError):  # then another may still be writing
                shutil.rmtree(partial, ignore_errors=True)  # where the disk is full, others need the room
        finally:
            self._release()

    def _publish(self, job: _Job, writer: CheckpointWriter) -> None:
        partial = folders.partial_folder(self.root, job.step)
        metadata = writer.finish()
        if self._model_folder is not None:
            copy_model_files(self._model_folder, partial / MODEL_FOLDER)
        others = sorted(folders.names_in(partial) - writer.files.keys())
        config, lora = job.config, job.config.lora
        manifest = CheckpointManifest(
            step=job.step,
            backend=config.backend,
            distribution=origin_of(BACKEND, config.backend),
            world_size=self._ranks.size,
            contents=job.contents,
            weights=saved_weights(metadata),
            user_state=job.user_state,
            lora=None if lora is None else SavedAdapters(rank=lora.rank, alpha=lora.alpha),
            head=config.head,
            saved_at=time.time(),
            files=writer.files | describe_files(partial, others),
        )
        manifest.write(partial)
        folders.publish(self.root, job.step)

    def _delete_old(self, job: _Job) -> None:
        """Delete older checkpoints than those to keep, now that a new one is whole; later ones are left alone."""
        if job.keep_last is None:
            return
        try:
            for old in [step for step in self.steps() if step <= job.step][: -job.keep_last]:
                folders.delete(self.root, old)
        except OSError as error:  # what was asked for is on the disk all the same
            _log.warning("old checkpoints in %s could not be deleted: %s", self.root, error)

    def _choose(self, step: int | None) -> int:
        """Let the first rank say which checkpoint: others may see an older state of the storage."""
        with self._ranks.together("loading a checkpoint"):
            if self._ranks.is_first:
                step = folders.find_step(self.root, step)
        chosen = self._ranks.broadcast(step, "loading a checkpoint")
        assert chosen is not None
        return chosen

    def _opened(
        self, engine: Engine, state: dict[str, Any], step: int, doing: str
    ) -> tuple[CheckpointManifest, CheckpointReader]:
        folder = folders.step_folder(self.root, step)
        with self._ranks.together(doing):
            manifest = CheckpointManifest.read(folder)
            manifest.require_intact(folder, part=self._ranks.rank, num_parts=self._ranks.size)
        with self._ranks.together(doing):
            reader = CheckpointReader(folder)
            reader.fit(state)
            _check_adapters(manifest, engine.config)
        return manifest, reader


def _require_equal(told: list[tuple[int, str]]) -> None:
    for rank, (step, state) in enumerate(told):
        if (step, state) != told[0]:
            raise WeightsError(
                f"the ranks do not save the same step and user_state: rank 0 has step {told[0][0]} and "
                f"{told[0][1]:.200}, rank {rank} has step {step} and {state:.200}"
            )


def _check_adapters(manifest: CheckpointManifest, config: EngineConfig) -> None:
    """Refuse adapters with another scale than they were trained with: nothing in the weights would show it."""
    was, now = manifest.lora, config.lora
    if was is not None and now is not None and was.alpha / was.rank != now.alpha / now.rank:
        raise WeightsError(
            f"engine.lora.alpha={now.alpha} with rank {now.rank}, but the checkpoint's adapters were trained with "
            f"alpha {was.alpha} and rank {was.rank}: they would count differently; use those"
        )
