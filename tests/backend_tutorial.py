"""The code that the tutorial on backends shows.

python -m tests.backend_tutorial FOLDER    # over the project ddp-engine, as `verl-engine new-backend` wrote it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from tests.repository import ROOT

PAGE: Final = (ROOT / "docs" / "tutorial" / "write-a-backend.md").read_text(encoding="utf-8")
BLOCKS: Final[list[tuple[str, str]]] = re.findall(r'```python title="(.+?)"\n(.*?)```', PAGE, flags=re.DOTALL)
DDP_FILES: Final = [f"src/ddp_engine/{name}.py" for name in ("config", "hooks", "engine")]


def shown(path: str) -> list[str]:
    """The lines of a file that the page shows, in one block or several; blank ones between blocks do not count."""
    return [line for title, text in BLOCKS if title == path for line in text.splitlines() if line.strip()]


def write_ddp_engine(project: Path) -> None:
    """Write the files of the engine of several ranks."""
    for path in DDP_FILES:
        [text] = [text for title, text in BLOCKS if title == path]
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_ddp_engine(Path(sys.argv[1]))
