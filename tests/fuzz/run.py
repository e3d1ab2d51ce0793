"""Try broken configs and data files against the loader and the readers: ``python -m tests.fuzz.run [--seed SEED]``.

Prints what was found, and one JSON object last. Ends with 1 where anything was found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from plugins.verl_async.tests.job_files import write_lines, write_model, write_prompts
from tests.fuzz.cases import Findings
from tests.fuzz.configs import fuzz_configs
from tests.fuzz.data_files import fuzz_data_files


def write_files(folder: Path) -> Path:
    """Write what sound jobs read."""
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl")
    write_lines(folder / "examples.jsonl", [{"prompt": "1+1=", "response": "2"}] * 4)
    return folder


def main() -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(description="Try broken configs and data files.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configs", type=int, default=6000)
    parser.add_argument("--data-files", type=int, default=1500)
    arguments = parser.parse_args()
    findings = Findings()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        fuzz_configs(findings, folder, write_files(folder / "files"), arguments.configs, arguments.seed)
        fuzz_data_files(findings, folder, arguments.data_files, arguments.seed)
        os.chdir("/")
    sys.stderr.write(findings.report())
    summary = findings.summary()
    sys.stdout.write(json.dumps(summary) + "\n")
    return 1 if any(summary[finding] for finding in findings.shown) else 0


if __name__ == "__main__":
    sys.exit(main())
