"""Search for bytes that a decoder cannot take, led by the code that they reach (Atheris, which is libFuzzer):

    python -m tests.fuzz --minutes 15                 every decoder, the minutes shared among them
    python -m tests.fuzz --minutes 5 message npz      these alone
    python -m tests.fuzz --keep                       then keep in tests/fuzz/corpus what reaches new code

Needs `pip install atheris`. What was found in earlier searches stays in FOLDER. A defect ends the search of its
decoder; its bytes are left in FOLDER/DECODER.crash-*, and go, made small, into tests/fuzz/corpus once it is mended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
MAX_BYTES = 4096
MEGABYTES = 2048
ONE_S = 10


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.argument("names", nargs=-1)
@click.option("--minutes", default=15.0, show_default=True, help="Of all searches together.")
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("/tmp/fedge-fuzz"), show_default=True)
@click.option("--keep", is_flag=True, help="Add to the repository's corpus what reaches new code.")
def main(names: tuple[str, ...], minutes: float, seed: int, folder: Path, keep: bool) -> None:
    """Search one decoder after the other, each in a process of its own."""
    from tests.fuzz.decoders import DECODERS

    chosen = names or tuple(DECODERS)
    failed = []
    for name in chosen:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        limits = (f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MEGABYTES}", f"-timeout={ONE_S}", f"-seed={seed}")
        places = (f"-artifact_prefix={folder / name}.", "-print_final_stats=1")
        search = (f"-max_total_time={max(int(60 * minutes / len(chosen)), 1)}", folder / name, CORPUS / name)
        click.echo(f"{name}:")
        if run(name, *limits, *places, *search) or (
            keep and run(name, *limits, "-merge=1", CORPUS / name, folder / name)
        ):
            failed.append(name)
    if failed:
        raise click.ClickException(f"defects in {', '.join(failed)}: their bytes are in {folder}")


def run(name: str, *flags: object) -> int:
    """Search one decoder; what libFuzzer says of it goes to this terminal."""
    command = (sys.executable, "-m", "tests.fuzz.one", name, *map(str, flags))
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    main()
