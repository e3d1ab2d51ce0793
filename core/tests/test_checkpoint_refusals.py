"""What does not fit is refused, before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.tests.test_checkpoint_store import same, trained
from core.tests.test_module_engine import PlainEngine, make, weights
from verl_engine.contract.errors import ConfigError, WeightsError
from verl_engine.engine.checkpoints.store import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints")
    yield store
    store.close()


def edit_manifest(store: CheckpointStore, **changed: Any) -> None:
    """Change fields, with a digest that fits."""
    path = store.root / "step-00000001" / "checkpoint.json"
    fields = {**json.loads(path.read_text(encoding="utf-8")), **changed}
    del fields["sha256"]
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**fields, "sha256": seal}), encoding="utf-8")


def damage_version(store: CheckpointStore) -> None:
    edit_manifest(store, format_version=99, core_version="9.9")


def damage_manifest(store: CheckpointStore) -> None:
    (store.root / "step-00000001" / "checkpoint.json").write_text("{", encoding="utf-8")


def damage_field(store: CheckpointStore) -> None:
    edit_manifest(store, saved_at="yesterday")


def damage_metadata(store: CheckpointStore) -> None:
    (store.root / "step-00000001" / ".metadata").write_bytes(b"no pickle")


def damage_a_name(store: CheckpointStore) -> None:
    path = store.root / "step-00000001" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"inner.bias", b"inner.\xff\xff\xff\xff"))


def damage_size(store: CheckpointStore) -> None:
    (part,) = (store.root / "step-00000001").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-100])


def damage_files(store: CheckpointStore) -> None:
    (part,) = (store.root / "step-00000001").glob("*.distcp")
    part.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            damage_version,
            "format_version=99, written by verl-engine-core 9.9; this is .*, which reads versions 1 and",
        ),
        (damage_manifest, "checkpoint.json cannot be read: JSONDecodeError"),
        (damage_field, "saved_at='yesterday' cannot be: .* valid number; the file was damaged"),
        (damage_metadata, r"is damaged: .metadata has 9 bytes of \d+"),
        (damage_a_name, r"is damaged: .metadata holds something else than was saved"),
        (damage_size, r"is damaged: __0_0.distcp has \d+ bytes of \d+; load another step"),
        (damage_files, "is damaged: __0_0.distcp is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(
    store: CheckpointStore, damage: Any, says: str
) -> None:
    store.save(trained(), 1, wait=True)
    damage(store)
    engine = make(warmup_steps=5)
    with pytest.raises(WeightsError, match=says):
        store.load(engine)
    assert same(engine, make())
    assert not engine.optimizer.state


class Wider(torch.nn.Module):
    """Another shape, a name more and one less than the model of the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.extra = torch.nn.Parameter(torch.ones(1))


def test_a_checkpoint_of_another_model_is_refused_with_the_first_differences(store: CheckpointStore) -> None:
    store.save(trained(), 1, wait=True)
    other = PlainEngine(make().config, make().device, Wider())
    before = weights(other)
    with pytest.raises(WeightsError, match="does not fit this engine") as caught:
        store.load(other)
    for difference in (
        "model.extra is not in the checkpoint",
        "the engine has no model.count",
        "more. Nothing was loaded",
    ):
        assert difference in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(other).items())


def test_another_optimizer_is_refused(store: CheckpointStore) -> None:
    store.save(trained(), 1, wait=True)
    plain = make()
    sgd = PlainEngine(plain.config, plain.device, plain.module, optimizer=torch.optim.SGD(plain.parameters.values()))
    with pytest.raises(WeightsError, match=r"optimizer.param_groups.0.momentum is not in the checkpoint"):
        store.load(sgd)


def test_adapters_of_another_scale_are_refused(store: CheckpointStore) -> None:
    store.save(trained(lora={"rank": 4, "alpha": 8.0}), 1, wait=True)
    with pytest.raises(WeightsError, match=r"engine.lora.alpha=16.0 with rank 4, but .* trained with alpha 8.0"):
        store.load(make(lora={"rank": 4, "alpha": 16.0}))
    assert store.load(make(lora={"rank": 4, "alpha": 8.0})).step == 1


@pytest.mark.parametrize(
    "state", [{"shape": (1, 2)}, {1: "one"}, {"loss": float("nan")}, {"tensor": torch.ones(1)}, []]
)
def test_a_user_state_that_would_not_come_back_is_refused(store: CheckpointStore, state: Any) -> None:
    with pytest.raises(ConfigError, match="user_state"):
        store.save(trained(), 1, state)
    assert store.latest() is None


def test_an_empty_folder_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(WeightsError, match="holds no whole checkpoint; there are those of steps none"):
        store.load(make())
