"""What the pages say can be followed: links lead somewhere, every page is found, what two guides need stands once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml

from tests.repository import PACKAGES, ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(package / "README.md" for package in PACKAGES)]


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{heading}"
        for page in PAGES
        for target, heading in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text(encoding="utf-8"))
        if not leads_somewhere(page.parent / target if target else page, heading)
    ]
    assert broken == []


def leads_somewhere(target: Path, heading: str) -> bool:
    """Whether a file is there, and has a heading of which GitHub makes this anchor."""
    if not target.exists() or not heading:
        return target.exists()
    text = re.sub(r"```.*?```", "", target.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text(encoding="utf-8"))
    }
    assert [str(page) for page in ROOT.glob("docs/*/*.md") if page not in linked] == []


def test_no_paragraph_stands_in_two_guides() -> None:
    guides = [(ROOT / name).read_text(encoding="utf-8") for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md")]
    lines = [{line for line in guide.splitlines() if len(line) > 60} for guide in guides]
    assert [first & second for first in lines for second in lines if first is not second and first & second] == []


def test_what_git_runs_is_local() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    stages = {hook["id"]: hook["stages"] for hook in hooks}
    commit, push = ["pre-commit"], ["pre-push"]
    assert stages == {"ruff-check": commit, "ruff-format": commit, "lint-imports": commit, "mypy": push}


def test_every_note_has_a_name_that_towncrier_takes() -> None:
    names = [path.name for path in (ROOT / "changelog.d").iterdir()]
    pattern = r"(\d+|\+[\w.-]+)\.(added|changed|fixed|removed)(\.\d+)?\.md"
    assert [name for name in names if not re.fullmatch(pattern, name)] == []


def test_the_readme_starts_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in readme.splitlines() if line.startswith("    ")][:2]
    assert commands == [f"python -m pip install nox && python -m nox -s {session}" for session in ("demo", "tests")]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "\npython -m pip install nox && python -m nox -s tests\n" in (ROOT / ".ci" / "run").read_text(
        encoding="utf-8"
    )


def test_every_session_of_the_noxfile_is_described() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    sessions = re.findall(r"@nox\.session.*\ndef (\w+)\(session: nox\.Session\) -> None:\n    \"\"\"\w", noxfile)
    assert set(sessions) >= {
        "demo",
        "tests",
        "lint",
        "typecheck",
        "dev",
        "bench",
        "real_model",
        "turbo_real",
        "release",
    }
