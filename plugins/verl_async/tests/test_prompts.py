"""Reading prompt files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_async.data.prompts import read_prompts
from verl_async.data.rows import list_names
from verl_async.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "data_source": "addition",
    "prompt": [{"role": "user", "content": "1+2="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train"},
}


def write_jsonl(path: Path, *lines: str | bytes | dict[str, Any]) -> Path:
    parts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"".join((part if isinstance(part, bytes) else part.encode()) + b"\n" for part in parts))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_reads_verl_columns(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"prompts{suffix}"
    (write_jsonl if suffix == ".jsonl" else write_parquet)(path, GOOD, GOOD | {"data_source": "other"})
    first, second = read_prompts(path, "data.prompts")
    assert (first.index, first.data_source, first.ground_truth) == (0, "addition", "3")
    assert first.prompt == [{"role": "user", "content": "1+2="}]
    assert first.extra_info == {"split": "train"}
    assert (second.index, second.data_source) == (1, "other")


def test_text_prompts_other_ground_truths_and_no_extra_info(tmp_path: Path) -> None:
    row = {"data_source": "a", "prompt": " 1+2=", "reward_model": {"ground_truth": 3}}
    (prompt,) = read_prompts(write_jsonl(tmp_path / "p.jsonl", row), "data.prompts")
    assert prompt.prompt == " 1+2="
    assert prompt.ground_truth == 3
    assert prompt.extra_info == {}


def test_zero_is_a_ground_truth(tmp_path: Path) -> None:
    row = GOOD | {"reward_model": {"ground_truth": 0}}
    assert read_prompts(write_jsonl(tmp_path / "p.jsonl", row), "data.prompts")[0].ground_truth == 0


def test_parquet_drops_keys_that_only_other_messages_have(tmp_path: Path) -> None:
    named = GOOD | {"prompt": [{"role": "user", "content": "hi", "name": "Ada"}, {"role": "user", "content": "hi"}]}
    (prompt,) = read_prompts(write_parquet(tmp_path / "p.parquet", named), "data.prompts")
    assert prompt.prompt == named["prompt"]


def test_parquet_does_not_load_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    original = pyarrow.parquet.ParquetFile.iter_batches

    def spy(self: object, *, batch_size: int, columns: list[str]) -> object:
        asked.append(columns)
        return original(self, batch_size=batch_size, columns=columns)  # type: ignore[arg-type]

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", spy)
    read_prompts(write_parquet(tmp_path / "p.parquet", GOOD), "data.prompts")
    assert asked == [["data_source", "prompt", "reward_model", "extra_info"]]


def test_limit_takes_the_first_rows_and_ignores_the_rest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", GOOD, GOOD, "{broken")
    assert [prompt.index for prompt in read_prompts(path, "evaluation.sets.sums.prompts", limit=2)] == [0, 1]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", "", GOOD, "   ", GOOD)
    assert [prompt.index for prompt in read_prompts(path, "data.prompts")] == [0, 1]
    path = write_jsonl(tmp_path / "p.jsonl", "", GOOD, "   ", "{broken")
    with pytest.raises(DataError, match="line 4: not valid JSON"):
        read_prompts(path, "data.prompts")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_prompts(path, "data.prompts")) == 1


def without(column: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != column}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON (Expecting property name"),
        ("[1]", "the line is [1]; expected one JSON object a line"),
        ('{"data_source": 1e999}', "not valid JSON (1e999 is larger than any number"),
        ("[" * 100_000, "not valid JSON (maximum recursion"),
        (b'"\xff"', "not UTF-8 text (invalid start byte at byte 1)"),
        (
            without("prompt"),
            "no column 'prompt'; columns found: 'data_source', 'ability', 'reward_model', 'extra_info'",
        ),
        (without("data_source"), "no column 'data_source'"),
        (without("reward_model"), "no column 'reward_model'"),
        (GOOD | {"data_source": 3}, "data_source is 3; expected a text"),
        (GOOD | {"data_source": None}, "data_source is null; expected a text"),
        (GOOD | {"prompt": ""}, "prompt is ''; expected one that is not empty"),
        (GOOD | {"prompt": []}, "prompt is []; expected one that is not empty"),
        (GOOD | {"prompt": [{"role": "user", "content": " "}]}, "expected one that is not empty"),
        (GOOD | {"prompt": 7}, "prompt is 7; expected a text, or a list of messages"),
        (GOOD | {"prompt": ["hi"]}, "prompt[0] is 'hi'; expected a message"),
        (GOOD | {"prompt": [{"content": "hi"}]}, "prompt[0].role is null; expected a text such as 'user'"),
        (GOOD | {"prompt": [{"role": "user"}]}, "prompt[0].content is null; expected a text"),
        (GOOD | {"reward_model": "3"}, "reward_model is '3'; expected a mapping with ground_truth in it"),
        (GOOD | {"reward_model": {}}, "reward_model is {}; expected a mapping with ground_truth in it"),
        (GOOD | {"reward_model": {"ground_truth": None}}, "expected a mapping with ground_truth in it"),
        (GOOD | {"extra_info": [1]}, "extra_info is [1]; expected a mapping, or nothing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes | dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", GOOD, line)
    with pytest.raises(DataError, match=re.escape(f"data.prompts={path}, line 2: ")) as caught:
        read_prompts(path, "data.prompts")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_a_bad_parquet_row_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", GOOD, GOOD, GOOD | {"data_source": None})
    with pytest.raises(DataError, match=re.escape(f"data.prompts={path}, row 2: data_source is null")):
        read_prompts(path, "data.prompts")


def test_a_missing_parquet_column_names_those_found(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", {"question": "1+2=", "data_source": "a"})
    with pytest.raises(
        DataError, match="row 0: no column 'prompt'; columns found: 'question', 'data_source'; expected 'prom"
    ):
        read_prompts(path, "data.prompts")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    with pytest.raises(DataError, match=re.escape(f"data.prompts={missing}: no such file")):
        read_prompts(missing, "data.prompts")
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    with pytest.raises(DataError, match="it is a folder"):
        read_prompts(folder, "data.prompts")
    with pytest.raises(DataError, match=re.escape("unknown suffix '.csv'; expected a .parquet or .jsonl file")):
        read_prompts(tmp_path / "p.csv", "data.prompts")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="not a readable Parquet file after 0 rows") as caught:
        read_prompts(broken, "data.prompts")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
def test_an_empty_jsonl_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match="the file holds no rows; expected at least one, with columns data_source, prompt"
    ):
        read_prompts(path, "data.prompts")


def test_an_empty_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="the file holds no rows"):
        read_prompts(path, "data.prompts")


def test_validating_data_imports_no_torch(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", GOOD)
    code = (
        "import sys; from pathlib import Path; import verl_async.data.examples, verl_async.data.rewards\n"
        "from verl_async.data.prompts import read_prompts\n"
        "assert 'pyarrow' not in sys.modules\n"
        "read_prompts(Path(sys.argv[1]), 'data.prompts')\n"
        "assert not {'torch', 'transformers', 'ray', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_half_of_a_surrogate_pair_names_the_line(tmp_path: Path) -> None:
    whole = GOOD | {"prompt": "\U0001f600"}  # written as both halves
    path = write_jsonl(tmp_path / "p.jsonl", whole, GOOD | {"prompt": "1 \ud83d"})
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: '\\ud83d' is half of a surrogate pair"):
        read_prompts(path, "data.prompts")
    assert read_prompts(path, "data.prompts", limit=1)[0].prompt == "\U0001f600"


TOOLS = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"type": "function", "function": {"name": "g", "arguments": {"y": [{"z": "a"}]}}},
        ],
    },
    {"role": "tool", "content": "5", "name": "f"},
]


@pytest.mark.fault(25)
def test_jsonl_and_parquet_of_the_same_rows_are_the_same_prompts(tmp_path: Path) -> None:
    rows = [GOOD | {"prompt": TOOLS}, GOOD | {"prompt": [{"role": "user", "content": "hi", "name": "Ada"}]}]
    explicit = json.loads(json.dumps(rows))
    explicit[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["w"] = None
    expected = [row["prompt"] for row in rows]
    for same in (rows, explicit):
        for path in (write_jsonl(tmp_path / "p.jsonl", *same), write_parquet(tmp_path / "p.parquet", *same)):
            assert [prompt.prompt for prompt in read_prompts(path, "data.prompts")] == expected


@pytest.mark.fault(26)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_images_are_refused_and_an_empty_column_is_not(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p{suffix}"
    write = write_jsonl if suffix == ".jsonl" else write_parquet
    write(path, GOOD | {"images": []}, GOOD | {"images": [{"path": "a.png"}]})
    with pytest.raises(DataError, match=r"(line 2|row 1): images is .*a\.png.*jobs train on text alone"):
        read_prompts(path, "data.prompts")
    found: set[str] = set()
    assert len(read_prompts(path, "data.prompts", limit=1, found=found)) == 1
    assert found == {*GOOD, "images"}


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, None),
        ({"role": "user", "content": [{"type": "text", "text": "a"}] * 2}, "prompt[0].content is [{'type': 'text'"),
        ({"role": "user", "content": [{"type": "image"}]}, "expected a text, or one part {type: text, text: ...}"),
        ({"role": "assistant", "content": "hi"}, "prompt[0].role is 'assistant'; expected the last message"),
    ],
)
def test_content_in_parts_and_a_chat_that_is_answered(
    tmp_path: Path, message: dict[str, Any], expected: str | None
) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", GOOD | {"prompt": [message]})
    if expected is None:
        assert read_prompts(path, "data.prompts")[0].prompt == [{"role": "user", "content": "hi"}]
        return
    with pytest.raises(DataError) as caught:
        read_prompts(path, "data.prompts")
    assert expected in str(caught.value)


def table(extra: pa.Array[Any]) -> pa.Table:
    """Return GOOD twice, with another column ``extra_info``."""
    good = pa.Table.from_pylist([GOOD] * len(extra))
    return good.set_column(good.schema.get_field_index("extra_info"), "extra_info", extra)


def structs(values: pa.Array[Any]) -> pa.Array[Any]:
    return pa.StructArray.from_arrays([values], names=["at"])


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    "extra",
    [
        structs(pa.array([0, 1], pa.timestamp("ns"))),
        structs(pa.array([0, 2**62], pa.timestamp("us"))),
        structs(pa.array([0, 2**30], pa.date32())),
        structs(pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))),
        pa.StructArray.from_arrays([pa.array([1, 2])] * 2, names=["at", "at"]),
    ],
    ids=["nanoseconds", "far-timestamp", "far-date", "no-utf-8", "twice"],
)
def test_parquet_values_that_python_cannot_hold_name_row_and_column(tmp_path: Path, extra: pa.Array[Any]) -> None:
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(table(extra), path)
    try:
        prompts = read_prompts(path, "data.prompts")
    except DataError as error:
        assert re.search(r"p\.parquet, row [01]: extra_info of type .* cannot be read", str(error))  # noqa: PT017
    else:
        pytest.importorskip("pandas")  # which has a type for nanoseconds
        assert len(prompts) == 2


@pytest.mark.fault(24)
def test_what_stands_twice_is_refused(tmp_path: Path) -> None:
    line = json.dumps(GOOD)[:-1] + ', "prompt": "another"}'
    with pytest.raises(DataError, match=r"line 1: not valid JSON .the key 'prompt' stands twice"):
        read_prompts(write_jsonl(tmp_path / "p.jsonl", line), "data.prompts")
    good = pa.Table.from_pylist([GOOD])
    pyarrow.parquet.write_table(good.append_column("prompt", good["prompt"]), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="the column 'prompt' stands twice"):
        read_prompts(tmp_path / "p.parquet", "data.prompts")


@pytest.mark.fault(24)
def test_deep_values_are_refused(tmp_path: Path) -> None:
    line = json.dumps(GOOD | {"extra_info": {"a": None}}).replace("null", "[" * 300 + "]" * 300)
    with pytest.raises(DataError, match="line 1: values are nested more than 100 deep"):
        read_prompts(write_jsonl(tmp_path / "p.jsonl", line), "data.prompts")


@pytest.mark.fault(24)
def test_long_and_many_columns_are_named_in_short() -> None:
    assert list_names(["a", "b" * 100]) == f"'a', '{'b' * 36}..."
    assert list_names([f"c{number}" for number in range(30)]).endswith("'c19', 10 more")
    assert list_names([]) == "none"
