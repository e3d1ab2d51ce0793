"""Tokens go through given experts in transformers' architectures of all kinds; the others are refused by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.repository import ROOT
from verl_engine.contract.errors import ModelError
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss
from verl_engine.testing.tiny_models import write_tiny_mixture
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.forward.router_replay import RouterReplay
from verl_fsdp.model.trial import require_replay

if TYPE_CHECKING:
    from pathlib import Path

SELECTION: Final = {
    "dbrx": "weights that are normed by another norm",
    "deepseek_v3": "a bias that chooses, and weights without it; groups of experts",
    "gpt_oss": "a softmax of the chosen scores only",
    "llama4_text": "all experts run, with weights of 0",
    "qwen2_moe": "a shared expert beside them",
    "qwen3_moe": "scores of a softmax, normed",
}
"""Why each is in the suite."""
OTHERS: Final = (
    "afmoe", "aria_text", "axk1", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v32", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jamba", "kimi_linear",
    "laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral",
    "nemotron_h", "olmoe", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text", "solar_open",
)  # fmt: skip
REFUSED: Final = {
    "deepseek_v4": "chooses its experts otherwise",
    "jetmoe": "the model chooses experts 2 times in a forward, and 1 of its layers",
    "longcat_flash": "chooses its experts otherwise",
    "phimoe": "chooses its experts otherwise",
    "qwen3": "has no layer with experts",
    "zaya": "chooses its experts otherwise",
}


def load(name: str, folder: Path) -> Any:
    from tests.zoo.architectures import write  # imports transformers' models

    write(name, folder)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.filterwarnings("ignore")  # of all kinds, from transformers' models
@pytest.mark.parametrize("name", [*SELECTION, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_experts_get_the_tokens_that_are_given_to_them(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path / "model")
    require_replay(model)
    replay = RouterReplay(model)
    got: list[torch.Tensor] = []

    def note(_experts: torch.nn.Module, args: Any, options: Any) -> None:
        given = (*args, *options.values())
        got.extend(each for each in given if isinstance(each, torch.Tensor) and not each.is_floating_point())

    for module in model.modules():
        if "experts" in module._modules:
            module.experts.register_forward_pre_hook(note, with_kwargs=True)
    ids = torch.arange(3, 12)[None]

    def run(change: Any) -> torch.Tensor:
        got.clear()
        for layer in replay.layers:
            layer.given = None if layer.found is None else change(layer.found, layer.num_experts)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        found = [layer.taken() for layer in replay.layers]
        if name != "llama4_text":  # there, experts get no numbers
            assert all(map(torch.equal, got, found)), "experts got other tokens than the router says"
            assert len(got) == len(found)
        return logits

    own = run(None)
    # Weights go with their experts, by the model's own rule: in another order all is the same, to rounding.
    torch.testing.assert_close(run(lambda found, _: found.flip(-1)), own, rtol=1e-4, atol=1e-4)
    others = [(layer.taken() + 1) % layer.num_experts for layer in replay.layers]
    assert not torch.allclose(run(lambda found, num_experts: (found + 1) % num_experts), own, atol=1e-3)
    assert all(map(torch.equal, (layer.taken() for layer in replay.layers), others))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_given_experts_is_refused(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path / "model")
    forwards = {path: module.forward for path, module in model.named_modules()}
    with pytest.raises(ModelError, match=f"engine.router_replay=true: .*{REFUSED[name]}.*set it to false"):
        require_replay(model)
    assert {path: module.forward for path, module in model.named_modules()} == forwards


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "router-replay.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    config = Fsdp2Config(device="cpu", router_replay=True)
    worker = EngineWorker(config, write_tiny_mixture(tmp_path / "model"))
    worker.prepare((tmp_path / "store").as_uri())
    try:
        worker.create()
        names: dict[str, Any] = {"worker": worker, "sequences": make_sequences(4), "loss_fn": weighted_loss}
        exec(block, names)  # noqa: S102 - it is ours
    finally:
        worker.close()
    assert names["report"].optimizer.applied
    assert all(sequence.fields["routed_experts"].shape == (len(sequence), 2, 2) for sequence in names["sequences"])
