"""How much of generating falls into training, in whole jobs: the addition task, one rollout worker, staleness 0.5.

Two jobs: two mini-batches a step with a weight sync after each step, and one mini-batch with a sync after every second.
The first steps, in which all is started and warmed up, are left out. Last line: JSON.

    overlap_*        seconds in which the worker generates while the trainer trains, over those in which it generates
    trainer_wait_*   seconds in which the trainer waits for samples, over all
    gen_over_train_* seconds of generating over seconds of training
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
JOBS = {
    "two_batches": {"require_batches": 2, "trigger_parameter_sync_step": 1},
    "one_batch": {"require_batches": 1, "trigger_parameter_sync_step": 2},
}
BOUNDS = {"overlap_two_batches": 0.45, "overlap_one_batch": 0.8}
"""At least; for the first job the staleness allows 0.5 at most."""
MOST_WAIT = 0.1
SKIPPED = 0.2
"""Of the run, at its beginning."""


def main() -> None:
    """Run both jobs, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of a job (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = [sys.executable, str(ROOT / "examples" / "addition_data.py"), str(folder / "data")]
        subprocess.run(data, check=True, capture_output=True)  # noqa: S603 - our own
        for job, settings in JOBS.items():
            said = run_job(folder, job, settings, options.steps)
            if not options.json:
                print("\n".join(line for line in said.splitlines() if "idle" in line))
            spans = [json.loads(line) for line in (folder / job / "timeline.jsonl").read_text().splitlines()]
            metrics |= {f"{key}_{job}": round(value, 4) for key, value in measure(spans).items()}
    is_good = all(metrics[key] >= bound for key, bound in BOUNDS.items())
    metrics["within_bounds"] = float(is_good and metrics["trainer_wait_one_batch"] <= MOST_WAIT)
    print(json.dumps(metrics))


def run_job(folder: Path, name: str, settings: dict[str, int], num_steps: int) -> str:
    """Run one job; returns what it printed."""
    recipe = yaml.safe_load((ROOT / "examples" / "addition_grpo.yaml").read_text(encoding="utf-8"))
    del recipe["evaluation"]
    recipe["model"]["path"] = str(folder / "data" / "model")
    recipe["data"]["prompts"] = str(folder / "data" / "train.parquet")
    recipe["algorithm"]["drop_uniform_groups"] = False  # an untrained model is right too seldom
    # Half of what a sync grants. Samples that are all generated at once all end at once: too late for any overlap.
    recipe["rollout"]["max_batch_prompts"] = 32
    recipe["async_training"] = {"staleness_threshold": 0.5, **settings}
    recipe["trainer"]["num_steps"] = num_steps
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "verl_engine", "train", str(path), "--output", str(folder / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def measure(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratios of one job's timeline."""
    trainer = [span for span in spans if span["who"] == "trainer"]
    start_s, end_s = min(span["start_s"] for span in trainer), max(span["end_s"] for span in trainer)
    start_s += SKIPPED * (end_s - start_s)

    def stretches(who: str, what: str) -> list[tuple[float, float]]:
        return [
            (max(span["start_s"], start_s), span["end_s"])
            for span in spans
            if (span["who"], span["what"]) == (who, what) and span["end_s"] > start_s
        ]

    training, generating = stretches("trainer", "train"), stretches("rollouter-0", "generate")
    both_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in training for b in generating)
    generating_s = seconds(generating)
    return {
        "overlap": both_s / generating_s,
        "trainer_wait": seconds(stretches("trainer", "wait for samples")) / (end_s - start_s),
        "gen_over_train": generating_s / seconds(training),
    }


def seconds(stretches: list[tuple[float, float]]) -> float:
    """Add up stretches that do not overlap."""
    return sum(end_s - start_s for start_s, end_s in stretches)


if __name__ == "__main__":
    main()
