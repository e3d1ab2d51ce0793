"""The optimizer by its dotted path, and the groups of its parameters."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate
from verl_engine.engine.device import Device
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import accumulate, load_reference, make_sequences
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.update.optimizer import build_optimizer, find_class, parameter_groups, require_entrywise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from verl_engine.testing.rank_pools import OnRanks


class SignDescent(torch.optim.Optimizer):
    """An optimizer of somebody's own, without weight decay."""

    def __init__(self, params: Iterable[Any], lr: float, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move by the sign of the gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad.sign() * group["lr"] * group["power"])


def config(**settings: Any) -> Fsdp2Config:
    return validate(Fsdp2Config, {"backend": "fsdp2", "learning_rate": 0.1, **settings}, at="engine")


def parameters() -> dict[str, torch.nn.Parameter]:
    names = {"embed.weight": (4, 2), "layers.0.q.weight": (2, 2), "layers.0.norm.weight": (2,), "head.weight": (4, 2)}
    found = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in names.items()}
    found["frozen.weight"] = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return found


def settings_by_name(**settings: Any) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay of each parameter."""
    named = parameters()
    names = {id(parameter): name for name, parameter in named.items()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(named, config(**settings))
        for parameter in group["params"]
    }


def test_vectors_are_spared_decay_and_frozen_parameters_left_out() -> None:
    assert settings_by_name(weight_decay=0.5) == {
        "embed.weight": (0.1, 0.5),
        "layers.0.q.weight": (0.1, 0.5),
        "layers.0.norm.weight": (0.1, 0.0),
        "head.weight": (0.1, 0.5),
    }


def test_flat_shards_are_told_apart_by_the_dims_of_the_whole() -> None:
    flat = {"matrix": torch.nn.Parameter(torch.ones(4)), "vector": torch.nn.Parameter(torch.ones(4))}
    found = parameter_groups(flat, config(weight_decay=0.5), {"matrix": 2, "vector": 1})
    assert [group["weight_decay"] for group in found] == [0.5, 0.0]


def test_the_first_group_that_matches_counts() -> None:
    groups = [
        {"pattern": r"norm", "weight_decay": 0.25},
        {"pattern": r"^layers\.", "learning_rate_scale": 0.5},
        {"pattern": "embed|head", "learning_rate_scale": 0, "weight_decay": 0},
    ]
    assert settings_by_name(weight_decay=0.5, parameter_groups=groups) == {
        "embed.weight": (0.0, 0.0),
        "layers.0.q.weight": (0.05, 0.5),
        "layers.0.norm.weight": (0.1, 0.25),
        "head.weight": (0.0, 0.0),
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["layers.0.k.weight"],
            r"parameter_groups\[0\].*matches no parameter of the model; close .*layers\.0\.q\.weight",
        ),
        (["frozen"], "matches only parameters that are not trained, such as frozen.weight"),
        ([".", "embed"], r"parameter_groups\[1\].*matches only parameters that groups before it have, such as embed"),
    ],
)
def test_a_pattern_that_changes_nothing_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_by_name(parameter_groups=[{"pattern": pattern} for pattern in patterns])


def test_a_pattern_that_is_no_regular_expression_is_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match="is not a regular expression"):
        config(parameter_groups=[{"pattern": "("}])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "AdamW"}, "optimizer='AdamW' must be a dotted path such as torch.optim.AdamW"),
        ({"optimizer": "torch.optim.Adam W"}, "must be a dotted path"),
        ({"optimizer_options": {"lr": 1.0}}, "optimizer_options sets lr; set engine.learning_rate"),
        ({"optimizer_options": {"weight_decay": 1.0}}, "set engine.weight_decay"),
        ({"optimizer_options": {"betas": (0, 0)}}, "optimizer_options sets betas; set engine.betas"),
        ({"optimizer": "torch.optim.Adam", "betas": (0, 0)}, r"betas=\(0.0, 0.0\) is for optimizer=torch.optim.AdamW"),
        ({"optimizer": "torch.optim.SGD", "eps": 1.0}, r"eps=1.0 is for .*; set optimizer_options.eps if"),
    ],
)
def test_the_config_refuses_what_needs_no_torch_to_be_seen(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "NAdam", "RMSprop", "Adagrad", "Adadelta", "RAdam", "Adamax"])
def test_an_optimizer_may_cut_parameters_anywhere_where_each_entry_steps_alone(name: str) -> None:
    require_entrywise(config(optimizer=f"torch.optim.{name}"))


def test_an_optimizer_in_which_entries_meet_is_refused_where_parameters_are_cut_anywhere() -> None:
    """Adafactor keeps rows and columns apart: on pieces of a flat tensor its steps depend on the number of ranks."""
    with pytest.raises(ConfigError, match=r"^engine\.optimizer=torch\.optim\.Adafactor .* backend=fsdp2"):
        require_entrywise(config(optimizer="torch.optim.Adafactor"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.optimum.AdamW", "module torch.optimum cannot be imported"),
        ("torch.optim.AdmaW", "has no AdmaW; close to it are AdamW"),
        ("torch.nn.Linear", "must be a subclass of torch.optim.Optimizer"),
        ("torch.optim.LBFGS", "needs no closure"),
    ],
)
def test_what_is_no_optimizer_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_class(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_options": {"amsgad": True}}, "torch.optim.AdamW refuses .*amsgad"),
        ({"optimizer": "torch.optim.SGD", "optimizer_options": {"momentum": -1}}, "SGD refuses .*momentum"),
        ({"optimizer": f"{__name__}.SignDescent", "weight_decay": 0.5}, r"knows no weight_decay.*asks for \[0.5\]"),
    ],
)
def test_an_optimizer_that_refuses_its_arguments_says_which(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(parameters(), config(**settings), Device("cpu"))


def test_adamw_is_fused_where_it_can_be_and_takes_the_fields_of_the_engine() -> None:
    found = build_optimizer(parameters(), config(eps=1e-3, optimizer_options={"amsgrad": True}), Device("cpu"))
    assert (found.defaults["fused"], found.defaults["eps"], found.defaults["betas"]) == (True, 1e-3, (0.9, 0.95))
    assert found.defaults["amsgrad"]
    assert not build_optimizer(parameters(), config(), Device("npu")).defaults["fused"]
    unfused = config(optimizer_options={"fused": False, "foreach": True})
    assert not build_optimizer(parameters(), unfused, Device("cpu")).defaults["fused"]


def step_on_two_meshes(_rank: int) -> list[torch.Tensor]:
    """Step AdamW over parameters of two meshes and a plain one."""
    ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    single = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))["inner"]
    whole = torch.arange(8.0).view(4, 2)
    named = {
        "rows": torch.nn.Parameter(distribute_tensor(whole, ranks, [Shard(0)])),
        "alone": torch.nn.Parameter(distribute_tensor(whole, single, [Shard(0)])),
        "plain": torch.nn.Parameter(whole.clone()),
    }
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(named, config(), Device("cpu"))
    assert len(optimizer.param_groups) == 3
    optimizer.step()
    gathered = [cast("Any", named[name]).full_tensor().detach() for name in ("rows", "alone")]
    return [*gathered, named["plain"].detach()]


@pytest.mark.dist
def test_parameters_of_several_meshes_step_together(on_ranks: OnRanks) -> None:
    for rows, alone, plain in on_ranks(step_on_two_meshes):
        torch.testing.assert_close(rows, torch.arange(8.0).view(4, 2) - 0.1)
        assert torch.equal(rows, plain)
        assert torch.equal(alone, plain)


SECTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "torch.optim.SGD", "optimizer_options": {"momentum": 0.9, "nesterov": True}},
    "rmsprop": {"optimizer": "torch.optim.RMSprop", "optimizer_options": {"alpha": 0.9}},
    "own": {"optimizer": f"{__name__}.SignDescent", "optimizer_options": {"power": 0.5}},
    "groups": {
        "parameter_groups": [
            {"pattern": "lm_head", "learning_rate_scale": 0.1},
            {"pattern": "embed_tokens", "learning_rate_scale": 0},
            {"pattern": "norm", "weight_decay": 0.3},
        ],
        "weight_decay": 0.2,
    },
}
RATES = (0.5, 1.0, 1.0)


def train_on_rank(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    section = {
        "backend": "fsdp2",
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "device": "cpu",
        "max_grad_norm": 0.5,
        **settings,
    }
    driver = Driver(section, folder, rank, 2)
    steps = [driver.train(make_sequences(8, seed=seed)).optimizer for seed in range(len(RATES))]
    return driver.weights(), [step.learning_rate for step in steps]


def reference_weights(folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train a plain model in one process, each parameter with its own settings, looked up by hand."""
    model: torch.nn.Module = load_reference(folder)
    kind: Any = find_class(settings.get("optimizer", "torch.optim.AdamW"))
    options = copy.copy(settings.get("optimizer_options", {"betas": (0.9, 0.95)}))
    groups = []
    for name, parameter in model.named_parameters():
        scale, decay = 1.0, settings.get("weight_decay", 0.0) if parameter.ndim > 1 else 0.0
        if "parameter_groups" in settings:
            scale = 0.1 if "lm_head" in name else 0.0 if "embed_tokens" in name else 1.0
            decay = 0.3 if "norm" in name else decay
        groups.append({"params": [parameter], "lr": 0.01 * scale, "weight_decay": decay, "scale": scale})
    optimizer = kind(groups, lr=0.01, **options)
    for seed, rate in enumerate(RATES):
        accumulate(model, make_sequences(8, seed=seed))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * rate * group["scale"]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.dist
@pytest.mark.parametrize("name", SECTIONS)
def test_training_equals_that_of_a_plain_model_with_the_same_optimizer(
    model_folder: Path, name: str, on_ranks: OnRanks
) -> None:
    expected = reference_weights(model_folder, SECTIONS[name])
    for found, rates in on_ranks(train_on_rank, model_folder, SECTIONS[name]):
        assert rates == pytest.approx([0.01 * rate for rate in RATES]), "the engine's rate, whatever its groups have"
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            # RMSprop and signs turn the last bits of small gradients into whole steps.
            difference = (found[key] - tensor).abs()
            tolerance = 1e-5 if name in ("sgd", "groups") else 2e-3
            assert float((difference > tolerance).float().mean()) < 0.01, key


@pytest.mark.dist
def test_a_rate_of_zero_keeps_the_embedding(model_folder: Path, on_ranks: OnRanks) -> None:
    before = dict(load_reference(model_folder).named_parameters())
    (found, _), _ = on_ranks(train_on_rank, model_folder, SECTIONS["groups"])
    assert torch.equal(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], before["lm_head.weight"])
