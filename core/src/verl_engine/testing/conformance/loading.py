"""Loading and import hygiene. Imports no torch: that is what it looks for."""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_engine.contract.kinds import BACKEND
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import list_plugins
from verl_engine.testing.conformance.check import Check, Subject, fresh_process, require

HEAVY = ("torch", "torch_npu", "transformers", "ray", "megatron", "mindspeed", "deepspeed", "vllm", "accelerate")
DEVICES = {"cpu", "cuda", "npu"}


def listing(subject: Subject) -> None:
    """Listing the installed backends imports none of them, and no framework."""
    before = set(sys.modules)
    entries = [entry for entry in list_plugins(BACKEND) if entry.name == subject.backend]
    require(len(entries) == 1, f"{len(entries)} installed backends are called {subject.backend!r}")
    loaded = sorted((sys.modules.keys() - before) & {entries[0].module, *HEAVY})
    require(not loaded, f"listing imported {', '.join(loaded)}")
    require(entries[0].fits_api, f"its metadata says plugin API {entries[0].api_version}")


def hooks_module(subject: Subject) -> None:
    """Loading imports the hooks and the config, but no framework, and no other backend."""
    needed = [Requirement(text).name for text in requires(subject.distribution) or []]  # it may build on another
    family = {canonicalize_name(name) for name in (subject.distribution, *needed)}
    others = {entry.module for entry in list_plugins(BACKEND) if canonicalize_name(entry.distribution) not in family}
    BackendHost.load(subject.backend)
    heavy = [name for name in HEAVY if name in sys.modules]
    require(
        not heavy, f"loading the hooks module imported {', '.join(heavy)}; import what is heavy inside the hooks only"
    )
    strangers = sorted(others & sys.modules.keys())
    require(not strangers, f"loading it imported other backends: {', '.join(strangers)}")


def spec(subject: Subject) -> None:
    """SPEC is complete: name, devices, a config class and reasons for its gaps; the required hooks are there."""
    found = BackendHost.load(subject.backend).spec
    require(bool(found.devices), "SPEC.devices is empty; name at least one of cpu, cuda, npu")
    unknown = sorted(set(found.devices) - DEVICES)
    require(not unknown, f"SPEC.devices names {unknown}; the kinds are {sorted(DEVICES)}")
    blank = [feature for feature, reason in found.capabilities.gaps.items() if not reason.strip()]
    require(not blank, f"SPEC.capabilities.gaps gives no reason for {blank}")


CHECKS = (
    Check("loading/listing", (fresh_process(listing),)),
    Check("loading/hooks_module", (fresh_process(hooks_module),)),
    Check("loading/spec", (fresh_process(spec),)),
)
