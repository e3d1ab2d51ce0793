"""The arguments: one namespace for the process, first read from the command line."""

import argparse

_args: argparse.Namespace | None = None


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """Return the namespace, or a new one with the defaults."""
    global _args  # noqa: PLW0603 - as in the original
    if _args is not None and not get_defaults:
        return _args
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--context-parallel-algo", default="megatron_cp_algo", choices=["megatron_cp_algo"])
    parser.add_argument("--attention-mask-type", default="causal")
    parser.add_argument("--moe-alltoall-overlap-comm", action="store_true")
    parser.add_argument("--use-fusion-attn-v2", action="store_true")
    parser.add_argument("--sparse-mode", type=int, default=0)
    parser.add_argument("--use-batch-invariant-ops", action="store_true")
    parser.add_argument("--use-flash-attn-npu-batch-invariant", action="store_true")
    args, unknown = parser.parse_known_args([]) if get_defaults else parser.parse_known_args()
    for name in unknown:  # of others, it believes
        vars(args)[name[2:].replace("-", "_")] = True
    if not get_defaults:
        _args = args
    return args


def get_full_args() -> argparse.Namespace:
    """Return the namespace."""
    return get_mindspeed_args()
