"""The commands of the documents: run by tests/integration/test_doc_commands.py, but for blocks that say why not.

    python -m tests.support.doc_commands     lists the blocks that no test runs, with their reasons

The reason stands in the line before a block: `<!-- not run: board -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

REASONS = {
    "board": "needs a board, or another machine",
    "root": "needs root",
    "minutes": "takes longer than a minute",
    "data": "needs data or weights that do not come with fedge",
    "network": "installs something from the internet",
    "fleet": "names machines and files of a fleet that the text describes; tests/test_docs.py checks its flags",
    "help": "of --help, whose examples name files that nobody has; tests/test_docs.py checks their flags",
    "tests": "runs the tests themselves",
}

WHOLE = {"docs/cli.md": "help"}
"""Pages of which no block is run."""
EXAMPLES = dict.fromkeys(
    [
        "examples/boxes.py",
        "examples/methods/fedasync.py",
        "examples/methods/fedbn.py",
        "examples/methods/averaged.py",
    ],
    "minutes",
)
EXAMPLES |= dict.fromkeys(
    ["examples/custom_task.py", "examples/edge_server.toml", "examples/raspberry_pi.toml"], "fleet"
)
"""Why the commands in the first lines of an example are not run; tests/examples runs its code."""

BLOCK = re.compile(r"(?m:^<!-- not run: (?P<reason>\w+) -->\n)?(?ms:^```(?P<kind>\w*)\n(?P<text>.*?)^```$)")
COMMAND = re.compile(r"^(?:sudo |\S*/)?(?:fedge|python3?|make|pip|curl|docker|systemctl|apt) ", re.MULTILINE)
NOT_HERE = re.compile(r"\b(?:sudo|apt|pip3?|docker|systemctl) ")
STAYS = re.compile(r"^(fedge (?:broker|agent|relay|serve|ui)\b.*|fedge .*--follow.*?)\s*$")
"""Commands that end by Ctrl-C alone: without an `&` they are for a terminal of their own."""


class Block(NamedTuple):
    """`section`: the heading above it. `reason`: why no test runs it, None for one that is run."""

    page: str
    section: str
    line: int
    text: str
    reason: str | None


def blocks() -> Iterator[Block]:
    """All blocks of commands, in the order of the pages.

    Raises:
        ValueError: a block has commands and does not say so, or would change this machine.
    """
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        for found in BLOCK.finditer(text):
            line = text[: found.start("text")].count("\n") + 1
            if found["kind"] == "console":
                if not (found["reason"] or name in WHOLE) and NOT_HERE.search(found["text"]):
                    raise ValueError(f"{name}:{line}: say why it is not run: <!-- not run: root -->, for example")
                section = re.findall(r"^##? (.*)$", text[: found.start()], re.MULTILINE)[-1]
                yield Block(name, section, line, found["text"], found["reason"] or WHOLE.get(name))
            elif not found["kind"] and COMMAND.search(found["text"]):
                raise ValueError(f"{name}:{line}: begin a block of commands with ```console")
    for file in sorted(ROOT.glob("examples/**/*.*")):
        name = str(file.relative_to(ROOT))
        if file.suffix in {".py", ".toml"} and (
            found := re.findall(r"^#? {4,}(fedge .*)$", file.read_text(), re.MULTILINE)
        ):
            yield Block(name, "", 1, "\n".join(found), EXAMPLES[name])


def script(text: str, port: int, http: int) -> str:
    """The bash script of some blocks: broker and server at ports of their own, and what stays is in the background.

    One seed, few devices and few rounds are enough to see that a command runs.
    """
    text = re.sub(r"\b(?:server|localhost):(?:1883|8883)\b", f"localhost:{port}", text).replace(".venv/bin/", "")
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{http}").replace("curl -s ", "curl -sSf ")
    text = re.sub(r" *\\\n *", " ", text)
    lines = [re.sub(r"\s+#\s.*$", "", line) for line in text.splitlines()]
    return "\n".join([BACKGROUND, *(_line(line, port) for line in lines), "still_there"])


BACKGROUND = """
set -e
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
began=()
stays() { "$@" > "log.${#began[@]}" 2>&1 & began+=($!); }
answers() { until grep -q http "log.$((${#began[@]} - 1))"; do still_there; sleep 0.1; done; }
still_there() { for pid in "${began[@]}"; do kill -0 "$pid"; done; }
"""


FEW = {"devices": 6, "rounds": 5}


def _line(line: str, port: int) -> str:
    if program := re.match(r"fedge (simulate|compare|coordinator)\b", line):
        line = re.sub(r" --seeds [\d,]+", " --seeds 0", line)
        for name, most in FEW.items():
            n = re.search(rf" --{name} (\d+)", line)
            if n is None and program[1] != "coordinator":
                line += f" --{name} {most}"
            elif n is not None and int(n[1]) > most:
                line = line.replace(n[0], f" --{name} {most}")
    if re.match(r"fedge (broker|provision init)\b", line):
        bare = re.sub(r" --port \d+| &$", "", line)
        line = f"{bare} --port {port}{line[-2:] if line.endswith(' &') else ''}"
    found = STAYS.match(line)
    if found is None or line.endswith("&"):
        return line
    return f"stays {found[1]}" + ("; answers" if re.match(r"fedge (serve|ui)\b", line) else "")


if __name__ == "__main__":
    for block in blocks():
        if block.reason is not None:
            print(f"{block.page}:{block.line}: {block.reason}: {block.text.splitlines()[0]}")  # noqa: T201
