"""Apply MindSpeed: import its adaptor, tell it of the engine, and check that Megatron is completely patched."""

import difflib
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from verl_engine.contract.errors import ConfigError, PatchError, PreparationConflictError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.mindspeed.fp8_weights import check_fp8, use_weight_cache
from verl_megatron_mindspeed.mindspeed.packages import AdaptorPackage, choose_package, how_to_install, version_of
from verl_megatron_mindspeed.mindspeed.patches import read_patches
from verl_megatron_mindspeed.mindspeed.post_check import check_patches
from verl_megatron_mindspeed.mindspeed.repatch_keys import repatch_keys

_CONFLICT: Final = "exist !"
"""How MindSpeed's error ends where two features replace one name."""
_applied: dict[str, Any] = {}
"""What MindSpeed was told in this process; empty where it was not applied."""


def apply(config: MegatronConfig) -> None:
    """Patch Megatron for NPUs; in ``engine_prepare_process``, before anybody imports Megatron.

    Raises:
        PatchError: MindSpeed is not installed or failed, or some of Megatron is not patched. The process is then partly
            patched, and the host refuses it from here on.
        ConfigError: MindSpeed has no such argument as one of ``engine.mindspeed.features``, or cannot compute in FP8.
    """
    package = choose_package(config.mindspeed.adaptor)
    check_fp8(package, config.transformer_options.get("fp8"))
    keys = repatch_keys(config)
    with _on_its_own():
        adaptor = _import_adaptor(package)
        before = read_patches(package)
        _restore_arguments(package, config.mindspeed.features)
        _repatch(package, adaptor, keys, config.mindspeed.features)
    check_patches(package, before, read_patches(package))
    if config.mindspeed.fp8_reuse_quantized_weight:
        use_weight_cache()
    _applied.update(keys)


def check_same_patches(config: MegatronConfig) -> None:
    """Refuse an engine whose settings differ from those that MindSpeed was told of, in PreparationConflictError.

    Every engine calls it; it does nothing where MindSpeed is not used.
    """
    if not _applied:
        return
    keys = repatch_keys(config)
    differences = [
        f"{name}={keys.get(name)!r} (MindSpeed has {_applied.get(name)!r})"
        for name in sorted(keys.keys() | _applied.keys())
        if keys.get(name) != _applied.get(name)
    ]
    if differences:
        raise PreparationConflictError(
            f"this engine needs {', '.join(differences)}: MindSpeed patches Megatron once for a process, by the "
            "settings of its first engine. Give both the same, or processes of their own"
        )


def _import_adaptor(package: AdaptorPackage) -> Any:
    try:
        return importlib.import_module(package.module)
    except (Exception, SystemExit) as cause:  # it parses arguments, and argparse exits
        version = version_of(package.name)
        raise PatchError(
            f"{package.module}{f' of {package.name} {version}' * bool(version)}, without which Megatron does not run "
            f"on an NPU, failed: {type(cause).__name__}: {cause}. {how_to_install()}"
        ) from cause


def _restore_arguments(package: AdaptorPackage, features: dict[str, Any]) -> None:
    """Set MindSpeed's arguments back to its defaults: ``repatch`` adds to what they are, also what others had set.

    ConfigError where one of the features is none of them; MindSpeed would take it, and ignore it.
    """
    module = importlib.import_module(package.arguments)
    defaults = vars(module.get_mindspeed_args(get_defaults=True))
    for name in features:
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=3)
            advice = f"did you mean {' or '.join(close)}?" if close else "leave it out"
            raise ConfigError(
                f"engine.mindspeed.features.{name}: {package.name} has no such argument; {advice} (fields of "
                "Megatron's TransformerConfig belong into engine.transformer_options)"
            )
    arguments = vars(module.get_full_args())
    arguments.clear()
    arguments.update(defaults)


def _repatch(package: AdaptorPackage, adaptor: Any, keys: dict[str, Any], features: dict[str, Any]) -> None:
    try:
        adaptor.repatch(keys)
    except (Exception, SystemExit) as cause:
        place = traceback.extract_tb(cause.__traceback__)[-1]
        advice = how_to_install()
        if _CONFLICT in str(cause):
            advice = (
                f"Two features replace the same name; leave one out of engine.mindspeed.features={sorted(features)}"
            )
        raise PatchError(
            f"{package.module}.repatch failed half way, which leaves some of Megatron patched and some not: "
            f"{type(cause).__name__}: {cause} ({place.filename}:{place.lineno}). {advice}"
        ) from cause


@contextmanager
def _on_its_own() -> Iterator[None]:
    """Hide the program's arguments from MindSpeed, which takes them for its own, and keep its hands off the logging."""
    arguments, root = sys.argv, logging.getLogger()
    handlers, level = list(root.handlers), root.level
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments
        root.handlers[:] = handlers
        root.setLevel(level)
