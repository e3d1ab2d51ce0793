from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.tests.fake_distributions import write_distribution
from verl_engine import __version__
from verl_engine.command.app import main
from verl_engine.command.own_commands import OWN_COMMANDS
from verl_engine.contract.kinds import COMMAND
from verl_engine.contract.names import COMMANDS_GROUP
from verl_engine.host.install_hints import pip_install

FUNCTION = """
from pathlib import Path
from typing import Annotated
import typer
from verl_engine import ConfigError

def greet(name: Annotated[str, typer.Argument(help="Who is greeted.")], loud: bool = False) -> None:
    \"\"\"Greet somebody.\"\"\"
    if name == "nobody":
        raise ConfigError("greet.name='nobody': must be somebody") from KeyError("somebody")
    if name == "bug":
        raise RuntimeError("a bug")
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "exit":
        raise typer.Exit(7)
    if name in {"seven", "truth"}:
        return 7 if name == "seven" else True
    print(f"hello {name}" + "!" * loud)

app = typer.Typer()
app.command()(greet)
app.command("other")(greet)
number = 3
"""
CLICK = """
import click

@click.command()
@click.argument("name")
def greet(name):
    print(f"click says {name}")
"""


@pytest.fixture
def greeter(site: Path) -> Path:
    write_distribution(
        site,
        "greeter",
        {
            COMMANDS_GROUP: {
                "greet": "greet_function:greet",
                "many": "greet_function:app",
                "number": "greet_function:number",
            }
        },
        modules={"greet_function": FUNCTION},
    )
    return site


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"verl-engine {__version__}\n"


def test_help_lists_commands_of_plugins_without_importing_them(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_distribution(site, "toy-tools", {COMMANDS_GROUP: {"polish": "toy_polish:run"}}, requires=["no-such-thing"])
    (site / "toy_polish.py").write_text("raise RuntimeError", encoding="utf-8")
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Usage: verl-engine [OPTIONS] COMMAND" in text
    assert "polish About toy-tools (toy-tools 1.0) To fix: python -m pip install no-such-thing" in text
    assert "verl-engine train RECIPE.yaml --output DIR --dry-run" in text
    assert "toy_polish" not in sys.modules


def test_help_without_plugins_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verl_engine.command.overview.list_plugins", lambda _: [])
    monkeypatch.setenv("COLUMNS", "200")
    assert run() == 2
    text = capsys.readouterr().out
    assert pip_install("verl-async") in text
    assert pip_install("verl-fsdp") in text


@pytest.mark.usefixtures("greeter")
def test_a_plain_function_becomes_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "world", "--loud") == 0
    assert capsys.readouterr().out == "hello world!\n"


@pytest.mark.usefixtures("greeter")
def test_a_function_s_help_comes_from_its_hints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "--help") == 0
    text = capsys.readouterr().out
    assert "verl-engine greet [OPTIONS]" in text
    assert "Greet somebody." in text
    assert "Who is greeted." in text


@pytest.mark.usefixtures("greeter")
def test_a_typer_app_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("many", "other", "world") == 0
    assert capsys.readouterr().out == "hello world\n"


def test_a_click_command_is_a_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("click")
    write_distribution(site, "clicker", {COMMANDS_GROUP: {"c": "greet_click:greet"}}, modules={"greet_click": CLICK})
    assert run("c", "hi") == 0
    assert capsys.readouterr().out == "click says hi\n"


@pytest.mark.usefixtures("greeter")
def test_an_engine_error_is_a_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet", "nobody") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: greet.name='nobody': must be somebody\nThe whole traceback: set VERL_ENGINE_DEBUG=1 and run it again.\n"
    )


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(
    ("option", "variable", "is_shown"),
    [("--debug", "", True), ("", "1", True), ("", "0", False), ("", "", False)],
)
def test_debug_shows_the_traceback_with_its_cause(
    option: str, variable: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_ENGINE_DEBUG", variable)
    assert run(*filter(None, [option, "greet", "nobody"])) == 2
    text = capsys.readouterr().err
    assert ("Traceback" in text) is is_shown
    assert ("KeyError: 'somebody'" in text) is is_shown


@pytest.mark.fault(30)
@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(("name", "code"), [("seven", 7), ("truth", 0)])
def test_a_whole_number_that_a_command_returns_is_the_exit_status(name: str, code: int) -> None:
    assert run("greet", name) == code
    assert run("many", "greet", name) == code


@pytest.mark.fault(30)
def test_a_plugin_named_like_a_core_command_is_never_run_nor_shown_as_one(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(site, "pirate", {COMMANDS_GROUP: {"plugins": "pirate:run"}}, modules={"pirate": "1 / 0"})
    assert run("--help") == 0
    assert "pirate" not in capsys.readouterr().out
    assert run("plugins", "--kind", "command", "--json") == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["distribution"] == "pirate")
    assert row["status"] == "name taken by verl-engine-core itself, which never loads this one"


def test_names_that_no_plugin_can_have_are_those_of_the_core() -> None:
    assert COMMAND.reserved == OWN_COMMANDS.keys()


def every_help() -> dict[str, str]:
    """What ``-h`` prints of each command, in one process of its own."""
    script = """
import contextlib, io, json, sys
from verl_engine.command.app import main
texts = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([*words.split(), "-h"])
    texts[words] = out.getvalue()
print(json.dumps(texts))
"""
    commands = [*OWN_COMMANDS, "checkpoint inspect", "checkpoint export", "greet", "many", "many other", "c", ""]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    texts: dict[str, str] = json.loads(done.stdout)
    return texts


@pytest.mark.fault(33)
def test_every_command_has_a_short_help_option_and_the_same_look(greeter: Path) -> None:
    write_distribution(greeter, "clicker", {COMMANDS_GROUP: {"c": "greet_click:greet"}}, modules={"greet_click": CLICK})
    for words, text in every_help().items():
        assert "Usage: " + f"verl-engine {words}".strip() in " ".join(text.split()), words
        assert "bool" not in text, words
        assert "completion" not in text or not words, words
        if words != "c":  # click's own look
            assert "╭─ Options ─" in text, words


@pytest.mark.fault(33)
def test_a_shell_completes_commands_and_options(site: Path, greeter: Path) -> None:
    write_distribution(site, "broken", {COMMANDS_GROUP: {"grease": "no_such_module"}})

    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_VERL_ENGINE_COMPLETE": "complete_bash"}
        environment = {**os.environ, **words, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        script = "from verl_engine.command.app import main; main([])"
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert greeter == site
    assert complete("verl-engine gre") == ["greet"]
    assert complete("verl-engine doctor --b") == ["--backend"]
    assert complete("verl-engine checkpoint i") == ["inspect"]


@pytest.mark.fault(33)
def test_completion_is_shown_for_a_shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert run("--show-completion", "bash") == 0
    assert "complete -o default -F _verl_engine_completion verl-engine" in capsys.readouterr().out


@pytest.mark.usefixtures("greeter")
def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        main(["greet", "bug"])


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(("name", "code"), [("interrupt", 130), ("exit", 7)])
def test_the_exit_code_is_the_commands(name: str, code: int) -> None:
    assert run("greet", name) == code


@pytest.mark.usefixtures("greeter")
def test_wrong_arguments_end_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("greet") == 2
    assert "NAME" in capsys.readouterr().err.upper()
    assert run("--no-such-option") == 2
    assert run("backends", "--jsn") == 2


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gret", "error: command 'gret' is not a known command; did you mean greet?"),
        ("bakcends", "error: command 'bakcends' is not a known command; did you mean backends or"),
        ("number", "error: command 'number' points to 3; it must be a function, or a typer or click command"),
    ],
)
def test_what_is_no_command_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_broken_plugin_disturbs_only_itself(greeter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_distribution(greeter, "broken", {COMMANDS_GROUP: {"broken": "broken_x:run"}}, modules={"broken_x": "1 / 0"})
    assert run("broken") == 2
    assert "'broken' of broken 1.0 is installed, but importing broken_x:run failed" in capsys.readouterr().err
    assert run("greet", "world") == 0
    assert run("--help") == 0
    assert run("backends", "--json") == 0


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl_engine", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"verl-engine {__version__}\n"


def test_the_startup_benchmark_prints_its_numbers_last() -> None:
    benchmark = Path(__file__).parents[2] / "benchmarks" / "bench_startup.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--rounds", "1", "--json"], capture_output=True, text=True, check=True
    )
    assert {"core_import_ms", "backends_ms"} <= json.loads(done.stdout.splitlines()[-1]).keys()


def test_a_command_that_lacks_a_requirement_says_how_to_install_it(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(
        site,
        "lacking",
        {COMMANDS_GROUP: {"lack": "lack_function:run"}},
        modules={"lack_function": "def run(): import no_such_module"},
        requires=["no-such-thing>=2"],
    )
    assert run("lack") == 2
    error = capsys.readouterr().err
    assert "error: command 'lack' of lacking 1.0 cannot run: ModuleNotFoundError: No module named 'no_such" in error
    assert 'install what it needs: python -m pip install "no-such-thing>=2"' in error


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    ("redirection", "code"), [("| true", {0, 1, 141}), (">&-", {0}), (">&- 2>&-", {0}), ("> /dev/full", {2})]
)
def test_output_that_nobody_reads_gives_no_traceback(redirection: str, code: set[int]) -> None:
    command = f'"$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    arguments = ["bash", "-c", command, "bash", sys.executable, "-m", "verl_engine", "backends"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode in code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
