"""How the library gets onto a machine. Imports nothing."""

from typing import Final

MODULE: Final = "fsdp_turbo"
_SOURCE: Final = "https://gitcode.com/Ascend/FSDPTurbo.git"
_READ_UNTIL: Final = "2026-09-01"
"""The newest release that this package was written for is the last commit before."""

INSTALL: Final = (
    f"git clone {_SOURCE} && "
    f'git -C FSDPTurbo checkout "$(git -C FSDPTurbo rev-list -n 1 --before={_READ_UNTIL} HEAD)" && '
    "python -m pip install -e FSDPTurbo"
)
"""One line for a shell."""
WITHOUT_PIP: Final = 'export PYTHONPATH="$PWD/FSDPTurbo:$PYTHONPATH"'
"""In place of the last part of it."""
