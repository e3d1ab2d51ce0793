"""The cache of weights in FP8."""

calls: list[str] = []


def clear_weight_quantization_reuse_cache(release_storage: bool = False) -> None:
    """Forget the weights."""
    calls.append(f"clear {release_storage}")


def set_weight_release_enabled(enabled: bool) -> None:
    """Whether the weights themselves may be given away meanwhile."""
    calls.append(f"release {enabled}")
