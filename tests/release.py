"""Build a release, and try it as somebody would who has the wheel alone: `make release`. It ends with 0 if all is well.

    python -m tests.release           each extra without torch in a clean environment, all with torch in one together
    python -m tests.release --each    those with torch in an environment each, too, which takes minutes and gigabytes

It builds what is committed, and leaves both archives in `dist`. Environments take the versions of constraints.txt, and
share pip's cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path

import click
from packaging.requirements import Requirement

from fedge import __version__
from tests.support.requirements import EXTRAS

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedge", "edge_agent", "coordinator", "export", "deploy")
BESIDE_THEM = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml"}
"""What the sdist holds besides."""
MADE = re.compile(r"fedge-[^/]+\.dist-info/|fedge\.egg-info/|PKG-INFO$|setup\.cfg$")
"""What setuptools adds by itself."""
LEFT_OUT = {"dev": "for work on fedge itself"}
"""Extra -> why it is not tried. One that needs hardware, such as a GPU, belongs here, too."""
GOLDEN = ROOT / "tests/deploy/golden"
DEMO = ("--devices", 4, "--rounds", 3, "--samples", 400, "--participation", 1)
OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""The environment of commands that must not find the sources."""


class Checks:
    """Prints a line for each check, and below it what went wrong."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def note(self, what: str, wrong: str = "") -> bool:
        """Whether it passed: nothing is `wrong`."""
        self.failed, self.passed = self.failed + bool(wrong), self.passed + (not wrong)
        click.echo(f"{'FAILED' if wrong else 'ok':<9}{what}")
        if wrong:
            click.echo(textwrap.indent(wrong, " " * 9))
        return not wrong

    def run(self, what: str, *command: object, cwd: Path, wanted: str = "") -> bool:
        """Whether a command ended with 0 and printed what was `wanted`."""
        began = time.monotonic()
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, env=OUTSIDE, capture_output=True, text=True, check=False
        )
        passed = done.returncode == 0 and wanted in done.stdout
        said = f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return self.note(f"{what} ({time.monotonic() - began:.0f} s)", "" if passed else said)


@click.command()
@click.option("--each", is_flag=True, help="Try extras with torch in an environment each.")
def main(each: bool) -> None:
    """Build, look into what was built, and try it."""
    checks = Checks()
    check_papers(checks)
    with tempfile.TemporaryDirectory(prefix="fedge-release-") as folder:
        wheel = build(checks, Path(folder, "sources"))
    for name, why in LEFT_OUT.items():
        click.echo(f"{'skipped':<9}fedge[{name}]: {why}")
    if wheel:
        for extras in environments(each=each):
            with tempfile.TemporaryDirectory(prefix="fedge-release-") as folder:
                try_wheel(checks, wheel, extras, Path(folder))
    click.echo(f"{checks.passed} checks passed, {checks.failed} failed")
    sys.exit(1 if checks.failed else 0)


def check_papers(checks: Checks) -> None:
    """The version has a date and homes, and is committed."""
    heading = re.compile(rf"^## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)
    dated = heading.search((ROOT / "CHANGELOG.md").read_text())
    checks.note(f"CHANGELOG.md gives {__version__} a date", "" if dated else f"## {__version__} (YYYY-MM-DD)")
    there = (ROOT / "tests/homes" / __version__).is_dir()
    checks.note(f"tests/homes has homes of {__version__}", "" if there else "python -m tests.homes.make")
    checks.note("Everything is committed", git("status", "--porcelain").decode())


def git(*words: str) -> bytes:
    """What it prints, of this clone."""
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, check=True).stdout


def build(checks: Checks, sources: Path) -> Path | None:
    """The wheel, made from the sdist, which is made from what is committed; None if there is none."""
    archive = sources.with_suffix(".tar")
    archive.write_bytes(git("archive", "HEAD"))
    with tarfile.open(archive) as committed:
        committed.extractall(sources, filter="data")
    dist = ROOT / "dist"
    if not checks.run("The sdist and the wheel are built", sys.executable, "-m", "build", "-o", dist, ".", cwd=sources):
        return None
    wheel, sdist = dist / f"fedge-{__version__}-py3-none-any.whl", dist / f"fedge-{__version__}.tar.gz"
    wanted = files_of_packages(sources)
    checks.note(f"{wheel.name} holds the five packages alone", differences(names_in(wheel), wanted))
    also = "the packages, their pages and the pinned versions alone"
    checks.note(f"{sdist.name} holds {also}", differences(names_in(sdist), wanted | BESIDE_THEM))
    return wheel


def files_of_packages(sources: Path) -> set[str]:
    """Modules and data."""
    found = [path for package in PACKAGES for path in (sources / package).rglob("*") if path.is_file()]
    return {path.relative_to(sources).as_posix() for path in found}


def names_in(archive: Path) -> set[str]:
    """Files in a wheel, or in an sdist below its one folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(archive) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


def differences(found: set[str], wanted: set[str]) -> str:
    """A line for each file that is missing or too much; what setuptools makes does not count."""
    strays = {name for name in found - wanted if not MADE.match(name)}
    return "\n".join([f"missing: {name}" for name in sorted(wanted - found)] + [f"stray: {s}" for s in sorted(strays)])


def needs(extra: str) -> set[str]:
    """The packages that pyproject.toml names for an extra, and for the extras that this one takes in."""
    found: set[str] = set()
    for one in map(Requirement, EXTRAS[extra]):
        found |= set().union(*map(needs, one.extras)) if one.name == "fedge" else {one.name}
    return found


def environments(*, each: bool) -> list[tuple[str, ...]]:
    """The extras that are installed together."""
    tried = [extra for extra in EXTRAS if extra not in LEFT_OUT]
    with_torch = [extra for extra in tried if "torch" in needs(extra)]
    alone: list[tuple[str, ...]] = [(extra,) for extra in tried if each or extra not in with_torch]
    return alone if each else [*alone, tuple(with_torch)]


def try_wheel(checks: Checks, wheel: Path, extras: tuple[str, ...], folder: Path) -> None:
    """Install it with its extras in a clean environment, and run what they are for, away from the sources."""
    called, has = f"fedge[{','.join(extras)}]", {name for extra in extras for name in needs(extra)}
    programs = folder / "venv" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    install = (*pip, "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
    steps: list[tuple[str, tuple[object, ...]]] = [
        ("an environment is made", (sys.executable, "-m", "venv", "--without-pip", folder / "venv"))
    ]
    if "torch" in has:  # its pinned build would else bring gigabytes of CUDA
        steps.append(("torch is installed", (*install, "--no-deps", *sorted({"torch", "torchvision"} & has))))
    steps.append(("the wheel is installed", (*install, f"{wheel}[{','.join(extras)}]")))
    steps.append(("pip check", (*pip, "check")))
    if not all(checks.run(f"{called}: {what}", *command, cwd=folder) for what, command in steps):
        return
    fedge = programs / "fedge"
    checks.run(f"{called}: fedge --version", fedge, "--version", cwd=folder, wanted=f"version {__version__}\n")
    if "onnxruntime" in has:
        checks.run(f"{called}: fedge doctor", fedge, "doctor", cwd=folder)
        golden = (GOLDEN / "bundle", GOLDEN / "expected.npz", "--json")
        checks.run(f"{called}: fedge infer", fedge, "infer", *golden, cwd=folder, wanted='"accuracy":1.0,')
    if "amqtt" in has:
        checks.run(f"{called}: fedge demo", fedge, "demo", *DEMO, cwd=folder)


if __name__ == "__main__":
    main()
