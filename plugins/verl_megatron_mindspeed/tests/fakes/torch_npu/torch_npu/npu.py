"""What becomes ``torch.npu``."""

_current = 0


def is_available() -> bool:
    """There are devices."""
    return True


def device_count() -> int:
    """Two of them."""
    return 2


def set_device(index: int) -> None:
    """Choose one."""
    global _current  # noqa: PLW0603 - torch's own interface
    _current = index


def current_device() -> int:
    """Which one is chosen."""
    return _current


def synchronize(index: int | None = None) -> None:
    """Nothing is under way."""
