"""What is read and tokenized before any process starts."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from examples.addition_data import save_model
from plugins.verl_async.tests.fakes import train_job
from plugins.verl_async.tests.job_files import write_lines, write_prompts
from verl_async.config import SftJob
from verl_async.data.order import Mix
from verl_async.errors import DataError
from verl_async.model_folder import warning_on_vocabulary
from verl_async.orchestrator.inputs import (
    ModelTexts,
    read_evaluation_prompts,
    read_training_examples,
    read_training_prompts,
)
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pathlib import Path

POSITIONS = 64
"""Of the model of the examples."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", seed=0)
    return tmp_path / "model"


def sums(prompts: Path) -> dict[str, Any]:
    return {"sets": {"sums": {"prompts": prompts}}}


def test_a_prompt_that_fits_with_its_answer(tmp_path: Path, model: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")  # 1 + 4 tokens each
    job = train_job(data={"prompts": prompts}, rollout={"max_response_tokens": POSITIONS - 5})
    encoded, mix = read_training_prompts(job, ModelTexts.load(model), print)
    assert (len(encoded), mix) == (4, Mix((4,)))


@pytest.mark.parametrize("field", ["data.prompts", "evaluation.sets.sums.prompts"])
def test_a_prompt_that_does_not_fit_with_its_answer(tmp_path: Path, model: Path, field: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 11)  # the last one, 10+1=, has a token more
    job = train_job(data={"prompts": prompts}, evaluation=sums(prompts), rollout={"max_response_tokens": POSITIONS - 5})
    texts = ModelTexts.load(model)
    read = (
        partial(read_training_prompts, job, texts, print)
        if field == "data.prompts"
        else partial(read_evaluation_prompts, job, texts, 16, print)
    )
    with pytest.raises(
        ConfigError,
        match=rf"max_response_tokens=59 after a prompt of 6 tokens \({field}, row 10.*\) makes 65 tokens; .* 64",
    ):
        read()


def sft_job(folder: Path, rows: list[dict[str, Any]], **data: Any) -> SftJob:
    return SftJob.model_validate(
        {
            "model": {"path": folder / "model"},
            "engine": EngineConfig(backend="toy", learning_rate=0.1),
            "data": {"examples": write_lines(folder / "examples.jsonl", rows), **data},
            "trainer": {"num_steps": 1},
        }
    )


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path, model: Path) -> None:
    texts, said = ModelTexts.load(model), list[str]()
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)  # the last two have a token more
    changes: dict[str, Any] = {"evaluation": sums(prompts), "rollout": {"max_response_tokens": 8}}
    job = train_job(data={"prompts": prompts, "max_prompt_tokens": 5, "overlong": "drop"}, **changes)
    encoded, mix = read_training_prompts(job, texts, said.append)
    assert [one.prompt.index for one in encoded] == list(range(10))
    assert mix == Mix((10,))
    assert len(read_evaluation_prompts(job, texts, 5, said.append)["sums"]) == 10
    assert said == [
        f"warning: {field}: 2 of 12 rows are left out (data.overlong=drop), such as {field}, row 10: the prompt has 6 "
        "tokens; expected at most 5"
        for field in ("data.prompts", "evaluation.sets.sums.prompts")
    ]
    with pytest.raises(DataError, match=r"12 of 12 rows are left out .*; none is left"):
        read_training_prompts(
            train_job(data={"prompts": prompts, "max_prompt_tokens": 2, "overlong": "drop"}), texts, print
        )
    with pytest.raises(DataError, match=r"row 10: the prompt has 6 tokens; .* leave such rows out with data.overlong"):
        read_training_prompts(train_job(data={"prompts": prompts, "max_prompt_tokens": 5}), texts, print)
    rows = [{"prompt": "1+1=", "response": "2" * num} for num in (1, 7, POSITIONS)]  # too long: for 9 tokens, or at all
    for max_tokens, num_left in ((9, 1), (999, 2)):
        supervised = sft_job(tmp_path, rows, max_tokens=max_tokens, overlong="drop")
        assert len(read_training_examples(supervised, texts, said.append)[0]) == num_left
    assert said[-1].endswith("the example has 70 tokens; the model has positions for 64")


def test_several_files_are_read_and_their_weights_kept(tmp_path: Path, model: Path) -> None:
    files = [write_prompts(tmp_path / f"{name}.jsonl", number) for name, number in (("a", 2), ("b", 11))]
    weighted = [{"path": path, "weight": weight} for path, weight in zip(files, (3.0, 1), strict=True)]
    job = train_job(data={"prompts": weighted}, rollout={"max_response_tokens": 8})
    encoded, mix = read_training_prompts(job, ModelTexts.load(model), print)
    assert mix == Mix((2, 11), (3.0, 1.0))
    assert [one.prompt.row for one in encoded][:3] == [
        "row 0 of data.prompts[0]",
        "row 1 of data.prompts[0]",
        "row 0 of data.prompts[1]",
    ]
    job = train_job(data={"prompts": weighted, "max_prompt_tokens": 5})
    with pytest.raises(DataError, match=r"data.prompts\[1\], row 10: the prompt has 6 tokens"):
        read_training_prompts(job, ModelTexts.load(model), print)


def test_an_example_longer_than_the_positions(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2" * num} for num in (1, POSITIONS - 6, POSITIONS - 5)]
    job = sft_job(tmp_path, rows)
    with pytest.raises(DataError, match=r"data.examples, row 2: the example has 65 tokens; .* for 64"):
        read_training_examples(job, ModelTexts.load(model), print)


@pytest.mark.fault(9)
def test_tokens_that_the_model_does_not_have(tmp_path: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 15}), encoding="utf-8")
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    job = train_job(data={"prompts": prompts}, evaluation=sums(prompts))
    texts = ModelTexts.load(model)
    with pytest.raises(DataError, match=r"data.prompts, row 0: token 15 \('='\) is beyond .* vocab_size=15"):
        read_training_prompts(job, texts, print)
    with pytest.raises(DataError, match=r"evaluation\.sets\.sums\.prompts, row 0: token 15"):
        read_evaluation_prompts(job, texts, 16, print)
    (warning,) = warning_on_vocabulary(model)
    assert "the tokenizer has token ids up to 15, and the model's vocab_size is 15" in warning
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert warning_on_vocabulary(model) == []


@pytest.mark.parametrize("content", [[], {}, "no tokenizer"])
def test_a_tokenizer_that_is_none(model: Path, content: Any) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    (model / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=r"model.path=.* has no tokenizer that transformers can load"):
        ModelTexts.load(model)


def test_a_model_without_a_limit(model: Path) -> None:
    (model / "config.json").write_text("{}", encoding="utf-8")
    assert ModelTexts.load(model).max_tokens is None
