from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_async.ray.answers import ActorDiedError, ActorError, answers
from verl_engine.contract.errors import EngineError, ModelError

NAMES = ("trainer rank 0", "trainer rank 1")
DEATH = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: TrainerActor\n\tpid: 77\n"
    "Worker exit detail: Worker unexpectedly exits. Some common causes include: (1) …"
)


async def fails(error: BaseException, delay_s: float = 0.0) -> NoReturn:
    await asyncio.sleep(delay_s)
    raise error


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("train_batch", "Traceback …", cause)


def failure_of(*references: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        asyncio.run(answers(references, NAMES))
    return caught.value


def test_results_are_in_order() -> None:
    async def wait_for_both() -> list[int]:
        return await answers([asyncio.sleep(0.02, 1), asyncio.sleep(0, 2)], NAMES)  # type: ignore[list-item]

    assert asyncio.run(wait_for_both()) == [1, 2]


def test_a_death_explains_the_lost_connection_of_others() -> None:
    lost = fails(raised(RuntimeError("connection closed by peer")))
    error = failure_of(lost, fails(RayActorError(error_msg=DEATH), 0.1))
    assert isinstance(error, ActorDiedError)
    assert str(error).startswith("trainer rank 1 died (process 77): Worker unexpectedly exits. If the machine")


def test_an_error_of_ours_says_more_than_the_lost_connection_it_causes() -> None:
    lost = fails(raised(RuntimeError("connection closed by peer")))
    error = failure_of(lost, fails(raised(ModelError("model.path=/m is no folder")), 0.1))
    assert isinstance(error, ModelError)
    assert str(error) == "model.path=/m is no folder"


def test_any_other_error_names_the_actor() -> None:
    error = failure_of(fails(raised(ZeroDivisionError("division by zero"))), asyncio.sleep(0))
    assert isinstance(error, ActorError)
    assert str(error) == "trainer rank 0 failed: ZeroDivisionError: division by zero"


OUT_OF_MEMORY = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.7, ID: ab) where the task "
    "was running was 61.9GB / 62.0GB (0.99), which exceeds the memory usage threshold of 0.95. Top 10 memory users:\n"
    "PID\tMEM(GB)\tCOMMAND\n410\t12.0\tpsql --password=secret\n" + "more about it. " * 200
)


@pytest.mark.fault(17)
@pytest.mark.parametrize("error", [OutOfMemoryError(OUT_OF_MEMORY), RayActorError(error_msg=OUT_OF_MEMORY)])
def test_a_death_by_lack_of_memory_is_told_in_few_words(error: RayError) -> None:
    found = failure_of(fails(error), asyncio.sleep(0))
    assert isinstance(found, ActorDiedError)
    text = str(found)
    assert text.startswith("trainer rank 0 died: Ray ended it, for the machine ran low on memory. If the machine")
    assert "secret" not in text
    assert len(text) < 300
    assert found.__cause__ is error  # Ray's own words: for error.log


@pytest.mark.fault(17)
@pytest.mark.parametrize("error", [RayActorError(error_msg="long " * 999), RayError("long " * 999)])
def test_no_page_of_rays_goes_into_a_message(error: RayError) -> None:
    assert len(str(failure_of(fails(error), asyncio.sleep(0)))) < 500
