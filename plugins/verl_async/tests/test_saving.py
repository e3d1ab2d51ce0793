"""The model in the output folder, however training ends; on fakes."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from plugins.verl_async.tests.fake_rollout import FakeRollout, write_weights
from plugins.verl_async.tests.fakes import FakeListener, FakeTrainer
from verl_async.errors import RewardError
from verl_async.orchestrator import saving
from verl_async.orchestrator.saving import LABEL, ModelSaver
from verl_async.report.output_folder import OutputError, OutputFolder
from verl_engine.contract.errors import EngineError, StuckError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class SavingTrainer(FakeTrainer):
    """Writes a folder, or raises what it is told to."""

    def __init__(self, *failures: Exception | float) -> None:
        super().__init__()
        self.failures = list(failures)

    async def save_pretrained(self, folder: Path) -> None:
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            await asyncio.sleep(failure)
        write_weights(folder, "trainer")


class CopyingTexts:
    """Copies the tokenizer."""

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


@dataclass
class Case:
    """A saver on fakes."""

    output: OutputFolder
    trainer: SavingTrainer = field(default_factory=SavingTrainer)
    rollouts: Sequence[FakeRollout] = ()
    listener: FakeListener = field(default_factory=FakeListener)

    def run(self, *, failure: BaseException | None = None) -> None:
        async def training() -> None:
            await asyncio.sleep(0)
            if failure is not None:
                raise failure

        async def main() -> None:
            saver = ModelSaver(self.trainer, self.rollouts, cast("Any", CopyingTexts()), self.output, self.listener)
            await saver.save_after(training())

        asyncio.run(main())

    @property
    def saved(self) -> str:
        return (self.output.model / "weights").read_text()


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OutputFolder:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return OutputFolder.create(tmp_path / "out")


def test_a_finished_job_saves(output: OutputFolder) -> None:
    case = Case(output)
    case.run()
    assert case.saved == "trainer"
    assert (output.model / "tokenizer.json").exists()
    assert case.listener.statuses == ["saving the model"]


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    "failure",
    [RewardError("a judge"), BrokenPipeError(32, "Broken pipe"), KeyError("rank"), SystemExit(0), MemoryError()],
)
def test_whatever_ends_training_the_model_is_saved(output: OutputFolder, failure: BaseException) -> None:
    case = Case(output)
    with pytest.raises(type(failure)):
        case.run(failure=failure)
    assert case.saved == "trainer"
    assert case.listener.statuses == ["failed: saving the model as it is"]


@pytest.mark.fault(14)
@pytest.mark.parametrize("num_failures", [1, 3])
def test_without_its_trainer_a_job_saves_the_weights_of_the_last_sync(
    output: OutputFolder, num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    rollouts[1].version = 7
    monkeypatch.setattr(rollouts[0], "save_pretrained", _refuse)  # as in the middle of a sync
    case = Case(output, SavingTrainer(*[EngineError("trainer rank 1 died.")] * 9), rollouts)
    with pytest.raises(EngineError, match="died"):
        case.run(failure=EngineError("trainer rank 1 died") if num_failures == 1 else None)
    assert case.saved == "rollouter-1"
    text = (output.model / LABEL).read_text()
    assert "weights of the last sync (version 7, float32, from rollouter-1; those of the trainer are lost)" in text
    warning = case.listener.statuses[-1]
    assert warning.startswith("warning: trainer rank 1 died. The weights of the last sync (version 7")
    assert warning.endswith(f"are in {output.model}")


async def _refuse(_: object) -> str:
    raise EngineError("a weight sync was under way")


@pytest.mark.fault(14)
def test_a_trainer_that_is_stuck_is_not_waited_for_twice(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LAST_SAVE_S", 0.05)
    case = Case(output, SavingTrainer(60.0, 60.0), [FakeRollout()])
    with pytest.raises(StuckError, match="trainer rank 1"):
        case.run(failure=StuckError("trainer rank 1 did not answer"))
    assert case.saved == "rollouter-0"
    assert len(case.trainer.failures) == 1


def test_without_any_copy_the_message_says_that_the_model_is_lost(output: OutputFolder, tmp_path: Path) -> None:
    case = Case(output, SavingTrainer(*[EngineError("it died")] * 9))
    with pytest.raises(RewardError):
        case.run(failure=RewardError("a judge"))
    assert case.listener.statuses[-1] == "warning: the model is lost: it died"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.fault(16)
def test_a_folder_that_cannot_be_written_gives_the_model_another_place(output: OutputFolder, tmp_path: Path) -> None:
    case = Case(output, SavingTrainer(OSError(28, "No space left on device"), OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        case.run()
    [place] = (tmp_path / "tmp").glob("*/model")
    assert (place / "weights").read_text() == "trainer"
    assert case.listener.statuses[-1] == (
        f"warning: OSError: [Errno 28] No space left on device. The model is in {place}"
    )


@pytest.mark.fault(16)
def test_a_folder_that_was_deleted_is_made_again(output: OutputFolder) -> None:
    shutil.rmtree(output.path)
    case = Case(output)
    case.run()
    assert case.saved == "trainer"
    assert output.was_deleted
    assert output.is_ours()


@pytest.mark.fault(16)
def test_a_folder_that_is_another_jobs_by_now_is_left_alone(output: OutputFolder, tmp_path: Path) -> None:
    shutil.rmtree(output.path)
    other = OutputFolder.create(output.path)
    write_weights(other.model, "another job")
    case = Case(output)
    with pytest.raises(OutputError, match="was deleted, and is another job's by now"):
        case.run()
    assert case.saved == "another job"
    [place] = (tmp_path / "tmp").glob("*/model")
    assert (place / "weights").read_text() == "trainer"
