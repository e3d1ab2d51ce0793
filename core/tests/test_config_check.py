"""Config classes that hide or change what the core's has are refused when their backend is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import HOOKS, write_distribution
from verl_engine import BackendHost, HookError
from verl_engine.command.app import main
from verl_engine.contract.names import BACKENDS_GROUP

if TYPE_CHECKING:
    from pathlib import Path

IMPORTS = "from typing import ClassVar, Literal\nfrom pydantic import Field, field_validator\n"


def write(site: Path, body: str) -> None:
    text = IMPORTS + HOOKS.format(name="toy").replace("    width: int = 4\n", body)
    assert body in text
    write_distribution(site, "toys", {BACKENDS_GROUP: {"toy": "toy_hooks"}}, modules={"toy_hooks": text})


@pytest.mark.fault(29)
@pytest.mark.filterwarnings("ignore:Field name:UserWarning")
@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("    learning_rate: str = 'fast'\n", "it changes the field learning_rate"),
        ("    learning_rate: float = 0.5\n", "it changes the field learning_rate"),
        ("    num_threads: int = Field(default=4, ge=1, le=1024)\n", "it changes the field num_threads"),
        ("    device: Literal['cpu'] = 'cpu'\n", "it changes the field device"),
        ("    observers: int = 0\n", "it changes the field observers"),
        ("    seed: ClassVar[int] = 3\n", "it takes the field seed away"),
        ("    backend: Literal['other'] = 'other'\n", "its field backend does not take 'toy'"),
        ("    data_parallel_ranks: int = 4\n", "its field data_parallel_ranks hides EngineConfig.data_parallel_ranks"),
        ("    copy: bool = True\n", "its field copy hides EngineConfig.copy"),
        ("    required_features: ClassVar[int] = 1\n", "its required_features cannot be called as EngineConfig"),
        (
            "    def validate_world(self): ...\n",
            "its validate_world cannot be called as EngineConfig.",
        ),
        ("    async def validate_world(self, world_size): ...\n", "its validate_world cannot be called as"),
        (
            "    def _check(self): return self\n",
            "its _check hides EngineConfig._check, which would no longer be",
        ),
        ("    model_config = {'extra': 'ignore'}\n", "it sets extra='ignore' in place of 'forbid'"),
        ("    model_config = {'frozen': False}\n", "it sets frozen=False in place of True"),
        (
            "    model_config = {'alias_generator': str.upper}\n",
            "it changes the field device; it changes the field num",
        ),
    ],
)
def test_what_hides_or_changes_the_cores_is_refused_at_load(site: Path, body: str, fault: str) -> None:
    write(site, body)
    with pytest.raises(HookError, match=r"^backend 'toy' of toys 1\.0: ToyConfig may add to EngineConfig, ") as caught:
        BackendHost.load("toy")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "    backend: Literal['toy', 'tool'] = 'toy'\n",
        "    def validate_world(self, world_size, at=''): ...\n",
        "    @field_validator('learning_rate')\n    @classmethod\n    def _small(cls, rate): return rate\n",
    ],
)
def test_what_adds_or_overrides_a_method_is_taken(site: Path, body: str) -> None:
    write(site, body)
    assert BackendHost.load("toy").spec.name == "toy"


@pytest.mark.fault(29)
def test_the_doctor_says_so(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_engine.command.doctor.examination.find_devices", lambda *_: ({"cpu": ["x"]}, ""))
    write(site, "    observers: int = 0\n")
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--backend", "toy", "--json"])
    assert caught.value.code == 1
    texts = [finding["text"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert any("it changes the field observers" in text for text in texts)
