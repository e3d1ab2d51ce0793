"""The backend's config class, and clear errors for what cannot be used. Imports no torch."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError, ModelError
from verl_engine.contract.validation import validate
from verl_engine.engine.token_output import TokenOutput
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.conformance.check import Check, Subject, all_ranks, fresh_process, refusal, require

if TYPE_CHECKING:
    from verl_engine.batch.packed import PackedBatch
    from verl_engine.testing.conformance.bench import Bench

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"no_such_field": 1}, "engine.no_such_field"),
    ({"learning_rate": -1.0}, "engine.learning_rate"),
    ({"learning_rate": "fast"}, "engine.learning_rate"),
    ({"lr_schedule": "no_such_schedule"}, "engine.lr_schedule"),
    ({"device": "no_such_device"}, "engine.device"),
    ({"max_grad_norm": 0.0}, "engine.max_grad_norm"),
    ({"warmup_steps": -1}, "engine.warmup_steps"),
)


def wrong_fields(subject: Subject) -> None:
    """A wrong engine section is refused, with the field's path in the message; nothing is ignored."""
    config_class = BackendHost.load(subject.backend).spec.config_class
    config = validate(config_class, subject.section(), at="engine")
    for wrong, path in WRONG:
        section = subject.section(**wrong)
        message = refusal(ConfigError, partial(validate, config_class, section, at="engine"))
        if message is None:
            raise AssertionError(f"{config_class.__name__} takes this silently, whose {path} is wrong: {section}")
        require(path in message, f"the message does not name {path}: {message}")
    is_frozen = refusal(ValidationError, partial(setattr, config, "learning_rate", 1.0)) is not None
    require(is_frozen, f"{config_class.__name__} can be changed after validation; keep it frozen")


def fields(subject: Subject) -> None:
    """The config class keeps every field that all backends share, and says what each of its own means."""
    config_class = BackendHost.load(subject.backend).spec.config_class
    own = config_class.model_fields
    silent = sorted(name for name, field in own.items() if not field.description and name != "backend")
    require(not silent, f"no docstring under {', '.join(silent)}")
    config = validate(config_class, subject.section(), at="engine")
    require(config.backend == subject.backend, f"engine.backend became {config.backend!r}")
    changed = {"betas": (0.5, 0.5), "eps": 0.5, "weight_decay": 0.5, "seed": 7, "num_threads": 2, "max_grad_norm": 0.5}
    assert changed.keys() <= EngineConfig.model_fields.keys()
    config = validate(config_class, subject.section(**changed), at="engine")
    ignored = [name for name, value in changed.items() if getattr(config, name) != value]
    require(not ignored, f"{config_class.__name__} overrides {', '.join(ignored)}")


def no_model(bench: Bench) -> None:
    """A folder that holds no model is refused with a ModelError that names it, on every rank."""
    from verl_engine.testing.conformance.driver import Driver

    arguments = bench.subject.section(), bench.folder, bench.rank, bench.world_size
    message = refusal(ModelError, partial(Driver, *arguments)) or ""
    bench.require(
        str(bench.folder) in message,
        f"creating an engine from an empty folder must raise a ModelError that names the folder; got {message!r}",
    )


def ranks(bench: Bench) -> None:
    """The config knows which ranks call the loss, and which have the same data and split its sequences."""
    from verl_engine.batch.packed import PackedBatch  # brings torch, as the others do
    from verl_engine.engine.micro_batch_pass import MicroBatchPass
    from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

    driver = bench.driver()
    called: list[bool] = []

    def loss_fn(output: TokenOutput, batch: PackedBatch) -> Any:
        called.append(True)
        return weighted_loss(output, batch)

    batch = PackedBatch.from_sequences(make_sequences(1), driver.engine.device.torch_device)
    driver.engine.set_training(True)
    driver.engine.forward_backward(MicroBatchPass([batch], loss_fn, lambda _: nullcontext()))
    driver.engine.zero_grad()
    claimed = driver.config.ranks_with_outputs(bench.world_size)
    found = tuple(bench.gather(bool(called)))
    require(found == claimed, f"the loss was called on ranks {found}, but ranks_with_outputs says {claimed}")
    data, parts = driver.config.data_parallel_ranks(bench.world_size), driver.config.sequence_ranks(bench.world_size)
    pairs = Counter(zip(data, parts, strict=True))
    every = {(rank, part) for rank in set(data) for part in range(max(parts) + 1)}
    require(
        pairs.keys() == every and len(set(pairs.values())) == 1,
        f"sequence_ranks says {parts}, and data_parallel_ranks {data}: ranks with the same data lack a part",
    )


CHECKS = (
    Check("config/wrong_fields", (fresh_process(wrong_fields),)),
    Check("config/fields", (fresh_process(fields),)),
    Check("config/no_model", (all_ranks(no_model),)),
    Check("config/ranks", (all_ranks(ranks),)),
)
