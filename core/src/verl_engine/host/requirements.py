"""Which requirements of a distribution are not met; plain ones are compared here: importing ``packaging`` is slow."""

import operator
import re
from collections.abc import Iterable, Mapping

from verl_engine.host.distributions import Distribution, normalize_name

_PLAIN = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[(?P<extras>[\w\s,.-]*)\])?\s*\(?(?P<specifiers>(?:[<>=!]=?\s*[\d.]+(?:\s*,\s*)?)*)\)?"
)
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']*)["']""")
_CLAUSE = re.compile(r"([<>]=?|[=!]=)([\d.]+)")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_RELEASE = re.compile(r"\d+(?:\.\d+)*(?=\+|$)")


def missing_requirements(
    requirements: Iterable[str], installed: Mapping[str, Distribution], extra: str = ""
) -> tuple[str, ...]:
    """Find the requirements, as in ``Requires-Dist``, that no installed distribution meets, as pip takes them.

    Distributions are by normalised name. Requirements of other extras than `extra` are left out; what an installed
    requirement needs for its own, such as the ``engine`` of ``verl-engine-core[engine]``, is looked at.
    """
    missing: list[str] = []
    for requirement in requirements:
        specification, _, marker = (part.strip() for part in requirement.partition(";"))
        if not _applies(marker, extra):
            continue
        if _is_met(specification, installed):
            missing += _missing_for_extras(specification, installed)
        else:
            missing.append(re.sub(r"\s+|[()]", "", specification) if "@" not in specification else specification)
    return tuple(dict.fromkeys(missing))


def _missing_for_extras(specification: str, installed: Mapping[str, Distribution]) -> list[str]:
    plain = _PLAIN.fullmatch(specification)
    if plain is None or not plain["extras"]:
        return []
    headers = installed[normalize_name(plain["name"])].read_headers()
    requirements = [text for field, text in headers if field == "requires-dist"]
    # Only requirements of the extra itself: what the distribution always needs is not checked here.
    return [
        missing
        for extra in plain["extras"].split(",")
        for missing in missing_requirements(
            (text for text in requirements if "extra" in text.partition(";")[2]), installed, extra.strip()
        )
    ]


def _applies(marker: str, extra: str) -> bool:
    plain = _EXTRA.fullmatch(marker)
    if not marker or plain is not None:
        return plain is None or (bool(extra) and normalize_name(plain[1]) == normalize_name(extra))
    from packaging.markers import InvalidMarker, Marker  # slow to import and seldom needed

    try:
        return Marker(marker).evaluate({"extra": extra})
    except InvalidMarker:  # a broken plugin must not disturb the listing of others
        return True


def _is_met(specification: str, installed: Mapping[str, Distribution]) -> bool:
    plain = _PLAIN.fullmatch(specification)
    if plain is None:
        return _is_met_by_packaging(specification, installed)
    found = installed.get(normalize_name(plain["name"]))
    if found is None:
        return False
    clauses = _CLAUSE.findall(plain["specifiers"].replace(" ", ""))
    release = _RELEASE.match(found.version)
    if release is None:  # a pre-release, say: packaging knows how those compare
        return not clauses or _is_met_by_packaging(specification, installed)
    return all(_COMPARE[sign](_numbers(release[0]), _numbers(bound)) for sign, bound in clauses)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".") if part]
    while len(numbers) > 1 and numbers[-1] == 0:  # 2.0 is 2
        numbers.pop()
    return tuple(numbers)


def _is_met_by_packaging(specification: str, installed: Mapping[str, Distribution]) -> bool:
    from packaging.requirements import InvalidRequirement, Requirement  # slow, seldom needed

    try:
        requirement = Requirement(specification)
    except InvalidRequirement:
        return True  # broken metadata: importing the plugin will tell
    found = installed.get(normalize_name(requirement.name))
    if found is None:
        return False
    return requirement.url is not None or requirement.specifier.contains(found.version, prereleases=True)
