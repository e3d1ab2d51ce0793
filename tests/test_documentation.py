"""What the pages say can be followed: links lead somewhere, and the README starts with two commands."""

from __future__ import annotations

import re

from tests.repository import PACKAGES, ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(package / "README.md" for package in PACKAGES)]


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


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
    assert set(sessions) >= {"demo", "tests", "lint", "typecheck", "dev", "bench", "real_model", "turbo_real"}
