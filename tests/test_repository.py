"""What a reader may rely on: the repository names no machine and no mirror, and shows its first commands."""

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# Where packages come from is the reader's own affair: whatever their pip is set up to use.
REGISTRIES = re.compile(
    r"\b(pypi|pythonhosted|npmjs|anaconda)\.(org|com)\b|\b(extra[-])?index[-]url\b|\bfind[-]links\b"
)
HOMES = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:home|Users|root|work)/[A-Za-z.]", re.MULTILINE)
PIN = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*(; python_version (<|>=) "3\.[0-9]+")?')


def texts() -> dict[str, str]:
    """Every text file that is tracked, or would be by `git add .`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    found = {}
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        raw = path.read_bytes() if path.is_file() else b"\0"
        if b"\0" not in raw:
            found[name] = raw.decode("utf-8", errors="replace")
    return found


@pytest.mark.parametrize("pattern", [REGISTRIES, HOMES], ids=["registries", "home folders"])
def test_no_file_names_a_registry_or_a_machine(pattern):
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group().strip()}"
        for name, text in texts().items()
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_readme_shows_the_first_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def test_the_changelog_has_a_place_for_the_next_change():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_constraints_are_names_and_versions_only():
    odd = [line for line in pins() if not PIN.fullmatch(line)]
    assert not odd, f"not a plain pin: {odd}"


def test_whatever_we_ask_for_is_pinned_and_explained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    names = {re.match(r"[\w.-]+", line).group() for line in asked} - {project["name"]}
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in pins()}
    reasons = (ROOT / "docs" / "decisions" / "0001-dependencies.md").read_text(encoding="utf-8")
    for name in sorted(names):
        assert name.lower().replace("_", "-") in pinned, f"{name} has no line in constraints.txt"
        assert f"`{name}`" in reasons, f"{name} has no reason in docs/decisions/0001-dependencies.md"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_bounds_hold_the_release_that_is_pinned_and_end_before_one_that_nobody_has_tried(python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def here(lines: list[str]) -> list[Requirement]:
        found = map(Requirement, lines)
        return [r for r in found if r.marker is None or r.marker.evaluate({"python_version": python})]

    pinned = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in here(pins())}
    asked = {canonicalize_name(r.name): r.specifier for r in here(project["dependencies"])}
    for name, bounds in asked.items():
        assert bounds.contains(pinned[name]), f"{name} {pinned[name]} is not within {bounds} on Python {python}"
    for name in ("jax", "transformers"):
        major, minor = map(int, pinned[name].split(".")[:2])
        later = f"0.{minor + 1}" if name == "jax" else f"{major + 1}"
        earlier = f"0.{minor - 1}.99" if name == "jax" else f"{major}.{minor - 1}.99"
        assert not asked[name].contains(later) and not asked[name].contains(earlier), f"{name}{asked[name]}"
