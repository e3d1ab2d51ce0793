"""What is not what was saved is refused: in a load, an inspection and an export."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from core.tests.test_checkpoint_refusals import edit_manifest
from core.tests.test_checkpoint_store import same, step, trained
from core.tests.test_command import run
from core.tests.test_module_engine import make
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.store import CheckpointStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fault(20)
DATA = "__0_0.distcp"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints, with a config beside the weights."""
    model_folder = tmp_path / "model_folder"
    model_folder.mkdir()
    (model_folder / "config.json").write_text('{"model_type": "unknown"}', encoding="utf-8")
    store = CheckpointStore(tmp_path / "checkpoints", model_folder=model_folder)
    engine = trained()
    for number in (1, 2):
        store.save(engine, number, {"position": number}, wait=True)
        step(engine)
    return store


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def require_refused(store: CheckpointStore, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By all who read a checkpoint; an engine stays as it was."""
    folder = store.root / "step-00000001"
    engine = make(warmup_steps=5)
    with pytest.raises(WeightsError, match=says):
        store.load(engine, 1)
    assert same(engine, make())
    with pytest.raises(WeightsError, match=says):
        export_checkpoint(folder, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    assert run("checkpoint", "inspect", str(folder)) == 2
    assert run("checkpoint", "inspect", str(store.root), "--json") == 1
    assert "error" in json.loads(capsys.readouterr().out)[0]


@pytest.mark.parametrize("name", [DATA, ".metadata", "model/config.json", "checkpoint.json"])
def test_one_bit_that_differs_is_refused_with_the_name_of_the_file(
    store: CheckpointStore, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.root / "step-00000001" / name
    flip(path, path.stat().st_size // 2)
    require_refused(store, name, tmp_path, capsys)


def test_it_is_refused_wherever_the_bit_is(store: CheckpointStore) -> None:
    folder = store.root / "step-00000001"
    draw = random.Random(0)
    for name in (DATA, "checkpoint.json"):
        intact = (folder / name).read_bytes()
        for _ in range(30):
            flip(folder / name, draw.randrange(len(intact)), draw.randrange(8))
            with pytest.raises(WeightsError, match=name):
                store.load(make(warmup_steps=5), 1)
            (folder / name).write_bytes(intact)
    assert store.load(make(warmup_steps=5), 1).step == 1


@pytest.mark.parametrize("name", [DATA, ".metadata", "checkpoint.json", ""])
def test_files_or_folders_swapped_between_steps_are_refused(
    store: CheckpointStore, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (store.root / f"step-0000000{number}" / name for number in (1, 2))
    aside = tmp_path / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    says = "damaged" if name in (DATA, ".metadata") else "holds the checkpoint of step 2, not that of its name"
    require_refused(store, says, tmp_path, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 1.0),
        ("step", True),
        ("world_size", 0),
        ("backend", ""),
        ("head", "hydra"),
        ("contents", "model"),
        ("weights", {"w": {"shape": [-1], "dtype": "float32"}}),
        ("weights", {"w": {"shape": [1], "dtype": "__class__"}}),
        ("user_state", []),
        ("lora", {"rank": 0, "alpha": 1.0}),
        ("lora", {"rank": 4}),
        ("saved_at", -1.0),
        ("format_version", 2.0),
        ("unknown", 1),
        ("files", {"../config.json": {"num_bytes": 1, "sha256": "0" * 64}}),
        ("files", {"/etc/passwd": {"num_bytes": 1, "sha256": "0" * 64}}),
        ("files", {DATA: {"num_bytes": 1, "sha256": "0"}}),
    ],
)
def test_fields_of_the_manifest_are_validated(
    store: CheckpointStore, field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(store, **{field: value})
    require_refused(store, rf"checkpoint.json: {field}\S*=.* cannot be: ", tmp_path, capsys)


@pytest.mark.parametrize("name", [DATA, "model/config.json", "model"])
def test_a_link_out_of_the_folder_is_not_followed(
    store: CheckpointStore, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.root / "step-00000001" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    require_refused(store, "leads out of the folder", tmp_path, capsys)


def test_an_export_takes_no_file_that_was_not_saved_and_deletes_none_beside_it(
    store: CheckpointStore, tmp_path: Path
) -> None:
    folder = store.root / "step-00000001"
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (folder / "model" / "link").symlink_to(tmp_path / "secret")
    (folder / "model" / "later.py").write_text("", encoding="utf-8")
    (tmp_path / ".exported.partial").mkdir()
    export_checkpoint(folder, tmp_path / "exported")
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / ".exported.partial").is_dir()


def make_first_version(store: CheckpointStore) -> None:
    path = store.root / "step-00000001" / "checkpoint.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    del fields["files"], fields["sha256"]
    path.write_text(json.dumps({**fields, "format_version": 1}), encoding="utf-8")


def test_a_checkpoint_of_before_there_were_checksums_loads_with_a_warning(
    store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    make_first_version(store)
    with caplog.at_level(logging.WARNING):
        assert store.load(make(warmup_steps=5), 1).user_state == {"position": 1}
    assert "step-00000001 was written before checkpoints had checksums" in caplog.text
    export_checkpoint(store.root / "step-00000001", tmp_path / "exported")
    assert run("checkpoint", "inspect", str(store.root)) == 0
    config = store.root / "step-00000001" / "model" / "config.json"
    config.rename(tmp_path / "elsewhere")
    config.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=r"model/config.json leads out of the folder"):
        export_checkpoint(store.root / "step-00000001", tmp_path / "second")
    capsys.readouterr()


def test_a_quick_inspection_reads_no_data(store: CheckpointStore, capsys: pytest.CaptureFixture[str]) -> None:
    path = store.root / "step-00000001" / DATA
    flip(path, 100)
    assert run("checkpoint", "inspect", str(store.root), "--quick") == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert run("checkpoint", "inspect", str(store.root), "--quick") == 1
    capsys.readouterr()


def test_one_checkpoint_says_whether_its_files_were_compared(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, says in (((), "of 3 files, all right"), (("--quick",), "of 3 files, not compared")):
        assert run("checkpoint", "inspect", str(store.root / "step-00000001"), *options) == 0
        assert says in capsys.readouterr().out


def test_a_manifest_that_is_whole_has_the_digest_of_its_fields(store: CheckpointStore) -> None:
    fields = json.loads((store.root / "step-00000001" / "checkpoint.json").read_text(encoding="utf-8"))
    assert fields.pop("sha256") == hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    assert sorted(fields["files"]) == [".metadata", DATA, "model/config.json"]


@pytest.mark.fault(24)
@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.array(3)])
def test_a_step_may_be_an_integer_of_any_kind(tmp_path: Path, number: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=np.int64(1))  # type: ignore[arg-type]
    store.save(trained(), 2, wait=True)
    store.save(trained(), number, wait=True)
    assert store.steps() == [3]
    assert store.load(make(warmup_steps=5), number).step == 3
    store.remove(number)
    assert store.steps() == []


@pytest.mark.fault(24)
@pytest.mark.parametrize("number", [1.0, "1", True, np.float64(1), float("nan"), [1]])
def test_another_kind_of_step_is_refused_at_once_and_the_folder_stays_free(tmp_path: Path, number: Any) -> None:
    store = CheckpointStore(tmp_path)
    store.save(trained(), 1, wait=True)
    for act in (
        lambda: store.save(trained(), number),
        lambda: store.load(make(), number),
        lambda: store.remove(number),
    ):
        with pytest.raises(ConfigError, match=r"step=.* must be an integer, and is"):
            act()
    store.keep_last = number
    with pytest.raises(ConfigError, match=r"keep_last=.* must be an integer"):
        store.save(trained(), 2)
    CheckpointStore(tmp_path).save(trained(), 3, wait=True)
    assert store.steps() == [1, 3]


@pytest.mark.fault(24)
def test_a_copy_that_fails_leaves_the_folder_free(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("verl_engine.engine.checkpoints.writer.StagingMemory.copy", fail)
        with pytest.raises(MemoryError):
            store.save(trained(), 3)
    CheckpointStore(store.root).save(trained(), 3, wait=True)
    assert store.steps() == [1, 2, 3]
