"""The trained model in the output folder, however training ends."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_async.orchestrator.waiting import within
from verl_async.termination import only_ctrl_c_interrupts
from verl_engine.contract.errors import EngineError, StuckError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from verl_async.orchestrator.actors import RolloutClient, Trainer
    from verl_async.orchestrator.inputs import ModelTexts
    from verl_async.orchestrator.listener import JobListener
    from verl_async.report.output_folder import OutputFolder

_LAST_SAVE_S: Final = 60.0
"""How long a job that failed waits for its model: who has it may be stuck."""
LABEL: Final = "RESCUED.txt"
"""Beside weights that are not the trainer's."""


@dataclass(frozen=True, slots=True)
class ModelSaver:
    """Saves from the trainer; where that fails, to another folder; where the trainer is gone, from a rollout worker."""

    trainer: Trainer
    rollouts: Sequence[RolloutClient]
    texts: ModelTexts
    output: OutputFolder
    listener: JobListener

    async def save_after(self, training: Awaitable[None]) -> None:
        """Train, then save; also after Ctrl-C or a failure of any kind, so that the steps so far are not lost.

        Raises:
            BaseException: what ended training, or what kept the model from its folder.
        """
        try:
            await training
        except BaseException as error:
            is_interrupted = isinstance(error, asyncio.CancelledError)
            why = "interrupted (Ctrl-C again leaves the model unsaved)" if is_interrupted else "failed"
            with only_ctrl_c_interrupts():
                await self._rescue(why, _LAST_SAVE_S if isinstance(error, StuckError) else None)
            raise
        self.listener.on_status("saving the model")
        try:
            await self._from_trainer(self.output.model)
        except Exception:
            await self._rescue("the model could not be saved", _LAST_SAVE_S)
            raise

    async def _rescue(self, why: str, limit_s: float | None) -> None:
        """Save what there is; says where, or why there is nothing.

        Args:
            why: what ended training.
            limit_s: for the trainer, where it may be stuck; else it has its own.
        """
        self.listener.on_status(f"{why}: saving the model as it is")
        try:
            saving = self._from_trainer(self.output.model)
            await (saving if limit_s is None else within(limit_s, "the trainer did not save the model", saving))
        except Exception as error:  # noqa: BLE001 - why training failed is what counts
            await self._save_otherwise(error)

    async def _save_otherwise(self, error: Exception) -> None:
        """Save to another folder, or from a rollout worker."""
        reason = (str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}").rstrip(".")
        elsewhere = Path(tempfile.mkdtemp(prefix=f"verl-engine-{self.output.path.name}-")) / "model"
        tries: list[tuple[Callable[[Path], Awaitable[str]], Path]] = []
        if not isinstance(error, StuckError):
            tries.append((self._from_trainer, elsewhere))
        for rollout in self.rollouts:
            tries += [(partial(self._from_rollout, rollout), folder) for folder in (self.output.model, elsewhere)]
        for save, folder in tries:
            try:
                what = await within(_LAST_SAVE_S, "no answer", save(folder))
            except Exception:  # noqa: BLE001, S112 - the next one may do
                continue
            self.listener.on_note(f"warning: {reason}. {what} in {folder}")
            break
        else:
            self.listener.on_note(f"warning: the model is lost: {reason}")
        with suppress(OSError):  # it is not empty where something was saved
            elsewhere.parent.rmdir()

    async def _from_trainer(self, folder: Path) -> str:
        if folder == self.output.model:
            self.output.claim_again()
        await self.trainer.save_pretrained(folder)
        self.texts.save(folder)
        return "The model is"

    async def _from_rollout(self, rollout: RolloutClient, folder: Path) -> str:
        if folder == self.output.model:
            self.output.claim_again()
        about = await rollout.save_pretrained(folder)
        text = f"The weights of the last sync ({about}, from {rollout.name}; those of the trainer are lost) are"
        (folder / LABEL).write_text(f"{text} in this folder.\n", encoding="utf-8")
        self.texts.save(folder)
        return text
