"""How long ``import verl_engine`` and ``verl-engine backends --json`` take beyond a bare ``python -c pass``.

The three are started in turn, so that a slow moment of the machine hits all of them; metrics are medians in
milliseconds, less the median of bare Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "bare": ["-c", "pass"],
    "core_import": ["-c", "import verl_engine"],
    # What the console script does.
    "backends": ["-c", "from verl_engine.command.app import main; main()", "backends", "--json"],
}


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="how often each is started (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    times = measure(options.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if not options.json:
        for name, values in times.items():
            print(f"{name}: median {medians[name]:.1f} ms, fastest {min(values):.1f} ms, slowest {max(values):.1f} ms")
    metrics = {
        "core_import_ms": round(medians["core_import"] - medians["bare"], 2),
        "backends_ms": round(medians["backends"] - medians["bare"], 2),
        "bare_python_ms": round(medians["bare"], 2),
        "rounds": options.rounds,
    }
    print(json.dumps(metrics))


def measure(rounds: int) -> dict[str, list[float]]:
    """Start each command once a round.

    Returns:
        Milliseconds of each start, by name of the command. One unmeasured round comes first: it fills the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for round_number in range(rounds + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
            if round_number:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()
