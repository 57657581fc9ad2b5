"""Lines of Python in the five packages, by feature, in several versions of the repository.

A file belongs to the first feature whose pattern it matches. A feature that reaches into files of another one counts
there: what grew in a file that already stood is in that file's row. Docstrings, comments and blank lines are told
apart by the parser, so that a row says how much of it is code.

    python benchmarks/size.py
    python benchmarks/size.py --since 7dd622a,27c722a
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from script import finish, parser_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedge", "edge_agent", "export", "coordinator", "deploy")
LATER: dict[str, str] = {
    "Python interface, notebooks": "coordinator/simulation/{interface,sample_cli}.py fedge/tasks/own.py",
    "identity, certificates, signed messages": (
        "coordinator/provision/* coordinator/provision/members.py edge_agent/agent/enrol.py fedge/system/systemd.py fedge/system/notify.py "
        "fedge/{identity,sealed,kit,certificates,renewal,mosquitto}.py"
    ),
    "what may leave a device, and the record of it": "fedge/{egress,egress_cli,ledger}.py",
    "differential privacy": (
        "*/steps/train_dp.py fedge/models/dp_sgd.py edge_agent/privacy/dp_ledger.py coordinator/fleet/accounted.py"
    ),
    "masked sums": (
        "*/steps/mask_*.py */steps/confirm_sum.py */steps/unmask.py */steps/train_masked.py edge_agent/privacy/masking.py "
        "fedge/{masking,shamir,fixed_point}.py coordinator/fleet/masked.py"
    ),
    "hostile devices": (
        "coordinator/aggregation/protection.py coordinator/aggregation/{rules,guarded}.py coordinator/fleet/quarantine.py"
    ),
    "hostile files and updates": "fedge/{npz,onnx_wire}.py coordinator/fleet/mqtt/checking.py",
    "relays": "coordinator/relay/* coordinator/fleet/{relayed,sites}.py",
    "Ray, search for settings": "coordinator/fleet/simulated/ray.py coordinator/fleet/simulated/on_ray.py coordinator/simulation/tune*.py",
    "several processes, PostgreSQL, buckets": (
        "coordinator/{roles,database,blobs}.py coordinator/fleet/mqtt/uploads.py"
    ),
    "backup and restore": "coordinator/service/backup.py",
    "asynchronous rounds": "coordinator/methods/{fedbuff,asynchronous}.py",
    "models down as differences": "coordinator/fleet/versions.py",
    "frozen networks, adapters, tables, sets of images": (
        "fedge/models/weights.py fedge/models/adapters.py fedge/{table,images}.py fedge/tasks/generated.py"
    ),
    "the fleet's page, commands that say why, metrics": (
        "coordinator/ui/* coordinator/{watch,watch_cli,control,samples}.py coordinator/rollout/{overview,making}.py "
        "fedge/{https,openmetrics,retained,logs}.py deploy/{metrics,statistics}.py"
    ),
    "new, check, doctor, report, tracking": (
        "fedge/{new,doctor}.py coordinator/{checks,checks_cli,runs,tracking}.py coordinator/simulation/commands/report.py"
    ),
    "small agents, updates on the disk": "edge_agent/{workplace,room}.py",
}
"""Features that came since 7dd622a, by files of their own; `{a,b}` stands for either."""
STOOD: dict[str, str] = {
    "methods and their mathematics": "coordinator/{methods,aggregation,clustering,selection}/* coordinator/extractor*",
    "simulation, comparisons, demo": "coordinator/{simulation,demo}/*",
    "runtime, serving, releases, rollouts": "deploy/* coordinator/rollout/* export/{signing,release_cli}.py",
    "bundles and their graphs": "export/* fedge/{bundle,fusion,energies,ort,calibration,divergence}.py",
    "what a device does": "edge_agent/* fedge/steps/* fedge/{step,sgd,stopping}.py",
    "tasks, networks, partitions": "fedge/tasks/* fedge/models/* fedge/{task,preprocess,validation}.py",
    "messages, tensors, transport": "fedge/{messages,tensors,codec,topics,transfer,transport,broker,credentials}.py",
    "rounds, fleets, store": "coordinator/*",
    "commands, configuration, files": "fedge/*",
}
"""Features that stood at 7dd622a, before methods and steps were plug-ins."""


def alternatives(pattern: str) -> list[str]:
    if "{" not in pattern:
        return [pattern]
    head, rest = pattern.split("{", 1)
    middle, tail = rest.split("}", 1)
    return [head + one + tail for one in middle.split(",")]


def feature_of(path: str) -> str:
    for name, patterns in (LATER | STOOD).items():
        if any(fnmatch(path, each) for pattern in patterns.split() for each in alternatives(pattern)):
            return name
    raise SystemExit(f"{path} belongs to no feature")


def kinds(source: str) -> Counter[str]:
    """Lines that are blank, only a comment, or of a docstring; `lines`: all."""
    lines = source.splitlines()
    found = Counter({"lines": len(lines)})
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                told |= set(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    found["docstrings"] = len(told)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and t.line.lstrip().startswith("#")}
    found["comments"] = len(comments - told)
    found["blank"] = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in told)
    return found


def packed(commit: str) -> dict[str, str]:
    """The packages' files in a commit."""
    data = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            member.name: file.read().decode()
            for member in archive
            if member.name.endswith(".py") and (file := archive.extractfile(member))
        }


def present() -> dict[str, str]:
    """The packages' files as they are."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def by_feature(sources: dict[str, str]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {name: Counter() for name in STOOD | LATER}
    for path, source in sources.items():
        found[feature_of(path)] += kinds(source)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--since", default="", help="earlier commits, with commas, oldest first")
    arguments = parser.parse_args()
    commits = [commit for commit in arguments.since.split(",") if commit]
    versions = [*(by_feature(packed(commit)) for commit in commits), by_feature(present())]

    def row(name: str, parts: Iterable[str]) -> str:
        counts = [sum((version[part] for part in parts), Counter()) for version in versions]
        last = counts[-1]
        code = last["lines"] - last["docstrings"] - last["comments"] - last["blank"]
        figures = [*(each["lines"] for each in counts), code, last["docstrings"], last["blank"]]
        return f"| {name} | " + " | ".join(f"{figure:,}" if figure else "-" for figure in figures) + " |"

    print("| feature | " + " | ".join([*commits, "now"]) + " | of it code | docstrings | blank |")
    print("|---|" + "---|" * (len(versions) + 3))
    for title, names in (("stood before", STOOD), ("came later", LATER)):
        print("\n".join(row(name, [name]) for name in names))
        print(row(f"**{title}**", list(names)))
    print(row("**all**", [*STOOD, *LATER]))
    finish(arguments, versions[-1])


if __name__ == "__main__":
    main()
