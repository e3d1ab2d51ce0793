from __future__ import annotations

import json
import sys
import zipfile
from importlib.metadata import Distribution as ImportlibDistribution
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from core.tests.fake_distributions import write_distribution
from verl_engine.contract.errors import UnknownPluginError
from verl_engine.contract.kinds import BACKEND, CORE_KINDS, KindSpec
from verl_engine.host.catalog import PluginEntry, list_plugins
from verl_engine.host.distributions import Distribution, installed_distributions, normalize_name
from verl_engine.host.install_hints import pip_install
from verl_engine.host.loading import load_plugin
from verl_engine.host.requirements import missing_requirements

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "fake.backends"
FAKE = KindSpec("fake", GROUP, "engine.fake", reserved=frozenset({"taken"}))
POINTS = {GROUP: {"toy": "toy_hooks"}}


def test_a_row_says_all_that_the_metadata_says_and_imports_nothing(site: Path) -> None:
    write_distribution(
        site,
        "Toy.Engine",
        {"other.group": {"x": "y"}, GROUP: {"toy": "toy_hooks:hooks [extra]"}},
        version="1.2rc1",
        info="toy_engine-1.2rc1.dist-info",
        modules={"toy_hooks": "raise RuntimeError"},
        keywords=["training", "verl-engine-api-2", "verl-engine-device-cpu", "verl-engine-device-npu"],
        requires=["numpy>=1", "no-such-thing>=2", 'only-extra; extra == "more"'],
    )
    assert list_plugins(FAKE) == [
        PluginEntry(
            kind=FAKE,
            name="toy",
            value="toy_hooks:hooks",
            distribution="Toy.Engine",
            version="1.2rc1",
            summary="About Toy.Engine",
            api_version=2,
            devices=("cpu", "npu"),
            missing=("no-such-thing>=2",),
        )
    ]
    assert list_plugins(FAKE)[0].fix == 'python -m pip install "no-such-thing>=2"'
    assert "toy_hooks" not in sys.modules


def test_without_keywords_api_version_and_devices_are_unknown(site: Path) -> None:
    write_distribution(site, "toy", POINTS)
    (entry,) = list_plugins(FAKE)
    assert (entry.api_version, entry.devices, entry.fix, entry.fits_api) == (None, (), None, True)


def test_a_module_that_is_on_no_package_index_is_missed(site: Path) -> None:
    keywords = ["verl-engine-module-json", "verl-engine-module-no_such_module"]
    write_distribution(site, "toys", {GROUP: {"toy": "x"}, BACKEND.group: {"a-toy": "x"}}, keywords=keywords)
    (entry,), (backend, *_) = list_plugins(FAKE), list_plugins(BACKEND)
    assert entry.missing_modules == backend.missing_modules == ("no_such_module",)
    assert (entry.is_incomplete, entry.problem) == (True, "missing module no_such_module")
    assert backend.fix == "verl-engine doctor --backend a-toy"


@pytest.mark.parametrize(("version", "what"), [(1, "toy"), (3, "verl-engine-core")])
def test_another_api_version_is_fixed_by_upgrading_the_older_side(site: Path, version: int, what: str) -> None:
    write_distribution(site, "toy", POINTS, keywords=[f"verl-engine-api-{version}"])
    (entry,) = list_plugins(FAKE)
    assert not entry.fits_api
    assert entry.fix == pip_install("--upgrade", what)


def test_the_first_distribution_on_the_path_hides_others_of_its_normalized_name(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_distribution(site, "toy-engine", POINTS, version="2.0", info="Toy_Engine-2.0.dist-info")
    write_distribution(tmp_path / "later", "toy_engine", POINTS, version="1.0")
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, str(tmp_path / "later"), "not-there"])
    assert [entry.version for entry in list_plugins(FAKE)] == ["2.0"]


def test_two_distributions_with_one_name_are_both_listed(site: Path) -> None:
    write_distribution(site, "toy-b", POINTS)
    write_distribution(site, "toy-a", POINTS)
    assert [entry.distribution for entry in list_plugins(FAKE)] == ["toy-a", "toy-b"]


@pytest.mark.fault(30)
def test_a_name_of_two_distributions_has_a_line_for_each_that_says_what_stays(site: Path) -> None:
    for name in ("toy-b", "toy-a"):
        write_distribution(site, name, POINTS)
    assert [(entry.problem, entry.fix) for entry in list_plugins(FAKE)] == [
        ("name also offered by toy-b", "python -m pip uninstall toy-a  # to keep toy-b"),
        ("name also offered by toy-a", "python -m pip uninstall toy-b  # to keep toy-a"),
    ]


@pytest.mark.fault(30)
def test_a_name_that_the_owner_of_the_kind_has_itself_is_refused(site: Path) -> None:
    write_distribution(site, "toy", {GROUP: {"taken": "toy_taken"}})
    (entry,) = list_plugins(FAKE)
    assert entry.problem == "name taken by verl-engine-core itself, which never loads this one"
    assert entry.fix == "python -m pip uninstall toy"
    with pytest.raises(UnknownPluginError, match="fake 'taken' is not a known fake"):
        load_plugin(FAKE, "taken")


def test_a_source_tree_with_egg_info_is_found(site: Path) -> None:
    write_distribution(site, "toy-engine", POINTS, version="0.3", info="toy_engine.egg-info")
    assert [(entry.distribution, entry.version) for entry in list_plugins(FAKE)] == [("toy-engine", "0.3")]


def test_leftovers_and_broken_metadata_disturb_nobody(site: Path) -> None:
    write_distribution(site, "left-over", POINTS, info="~eft_over-1.0.dist-info")
    (site / "old_style.egg-info").write_text("Name: old-style\nVersion: 1\n", encoding="utf-8")
    (site / "empty-1.0.dist-info").mkdir()
    broken = write_distribution(site, "broken", POINTS, requires=["this is ! no requirement", 'x; what == "y"'])
    (broken / "entry_points.txt").write_bytes(b"[" + GROUP.encode() + b"]\nno equals sign\n= x\n; c = d\nok = \xff\n")
    write_distribution(site, "toy", POINTS)
    assert [entry.name for entry in list_plugins(FAKE)] == ["ok", "toy"]


def test_a_zip_file_on_the_path_is_searched(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(site, "zipped", POINTS, keywords=["verl-engine-api-2"], requires=["no-such-thing"])
    archive = tmp_path / "plugins.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in site.rglob("*"):
            if path.is_file():
                file.write(path, path.relative_to(site))
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path[1:]])
    (entry,) = list_plugins(FAKE)
    assert (entry.distribution, entry.version, entry.api_version) == ("zipped", "1.0", 2)
    assert entry.missing == ("no-such-thing",)


def test_distributions_of_another_finder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = write_distribution(tmp_path / "hidden", "hidden", POINTS)

    class Finder:
        def find_spec(self, *_: object) -> None: ...

        def find_distributions(self, _: object) -> Iterator[ImportlibDistribution]:
            yield PathDistribution(info)

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [entry.distribution for entry in list_plugins(FAKE)] == ["hidden"]


def test_every_distribution_that_importlib_finds_is_found() -> None:
    import importlib.metadata as reference

    expected = {normalize_name(found.metadata["Name"]): found.version for found in reference.distributions()}
    found = {key: distribution.version for key, distribution in installed_distributions().items()}
    assert found.keys() == expected.keys()


def _installed(**versions: str) -> dict[str, Distribution]:
    return {name: Distribution(name, version, lambda _: None) for name, version in versions.items()}


@pytest.mark.parametrize(
    ("requirement", "missing"),
    [
        ("torch", ()),
        ("Torch>=2.5,<3", ()),
        ("torch (>=2.5)", ()),
        ("torch==2.13", ()),
        ("torch==2.13.0", ()),
        ("torch>2.13", ("torch>2.13",)),
        ("torch >= 2.14, <3", ("torch>=2.14,<3",)),
        ("torch~=2.12", ()),
        ("torch~=2.14", ("torch~=2.14",)),
        ("torch==2.*", ()),
        ("torch!=2.13.*", ("torch!=2.13.*",)),
        ("rc>=2.0rc1", ()),
        ("rc>=2.0", ("rc>=2.0",)),
        ("absent", ("absent",)),
        ("absent[more]>=1", ("absent[more]>=1",)),
        ("absent @ https://example.org/a.whl", ("absent @ https://example.org/a.whl",)),
        ("torch @ https://example.org/a.whl", ()),
        ('absent; python_version < "3"', ()),
        ('absent; python_version >= "3"', ("absent",)),
        ("absent; extra == 'dev'", ()),
        ('absent; python_version >= "3" and extra == "dev"', ()),
    ],
)
def test_requirements_are_met_or_named(requirement: str, missing: tuple[str, ...]) -> None:
    assert missing_requirements([requirement], _installed(torch="2.13.0+cpu", rc="2.0rc2")) == missing


def test_what_an_installed_requirement_needs_for_its_extra_is_named() -> None:
    metadata = """Name: core
Requires-Dist: always-needed
Requires-Dist: torch>=2; extra == 'engine'
Requires-Dist: absent>=1; extra == "engine"
Requires-Dist: deep; extra == 'engine' and python_version >= '3'
Requires-Dist: other; extra == 'testing'
"""
    installed = _installed(torch="2.13.0") | {"core": Distribution("core", "0.1.0", lambda _: metadata)}
    assert missing_requirements(["core[engine]>=0.1"], installed) == ("absent>=1", "deep")


numbers = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(numbers, st.sampled_from([">=", "<=", ">", "<", "==", "!="]), numbers, st.sampled_from(["", "+cpu"]))
@example("2", "==", "2.0.0", "+cpu")
def test_plain_versions_compare_as_packaging_does(version: str, operator: str, bound: str, local: str) -> None:
    is_met = SpecifierSet(f"{operator}{bound}").contains(version + local)
    assert (missing_requirements([f"x{operator}{bound}"], _installed(x=version + local)) == ()) == is_met


def test_commands_quote_what_a_shell_would_read() -> None:
    assert pip_install("torch>=2", "rich") == 'python -m pip install "torch>=2" rich'


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("came_from", "line"),
    [
        (None, '"verl-toy[x]>=1" verl-other torch'),
        ("file://{root}/core", '"{root}/plugins/verl_toy[x]" verl-other torch'),
        (
            "file://{root}/dist/verl_engine_core-1.0-py3-none-any.whl",
            '--find-links {root}/dist "verl-toy[x]>=1" verl-other torch',
        ),
        ("https://example.org/core.whl", '"verl-toy[x]>=1" verl-other torch'),
    ],
)
def test_a_package_of_this_project_is_installed_from_where_the_core_came(
    site: Path, tmp_path: Path, came_from: str | None, line: str
) -> None:
    """None of them is on an index: what pip was given for the core, it is given for the others."""
    core = write_distribution(site, "verl-engine-core", {})
    if came_from is not None:
        record = {"url": came_from.format(root=tmp_path), "dir_info": {}}
        (core / "direct_url.json").write_text(json.dumps(record), encoding="utf-8")
    folder = tmp_path / "plugins" / "verl_toy"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    assert pip_install("verl-toy[x]>=1", "verl-other", "torch") == f"python -m pip install {line.format(root=tmp_path)}"


@pytest.mark.fault(33)
def test_every_package_of_this_project_is_found_in_its_checkout() -> None:
    known = {owner for kind in CORE_KINDS for owner in kind.known.values()}
    for name in known:
        folder = pip_install(name).removeprefix("python -m pip install ")
        assert Path(folder, "pyproject.toml").is_file(), folder
