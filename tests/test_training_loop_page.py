"""The loop on the page runs as it stands there, on one rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.repository import ROOT, run_python

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Task

PAGE = (ROOT / "docs" / "how-to" / "training-loop.md").read_text(encoding="utf-8")


def test_the_loop_of_the_page_runs(task: Task, tmp_path: Path) -> None:
    block, _ = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    store = (tmp_path / "store").as_uri()  # other tests may hold the port of the page
    program = block.replace("tcp://127.0.0.1:29500", store).replace("data/addition/model", str(task.model))
    (tmp_path / "loop.py").write_text(program, encoding="utf-8")
    ran = run_python("loop.py", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[1]) for line in ran.stdout.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert (tmp_path / "outputs" / "loop" / "model.safetensors").is_file()
