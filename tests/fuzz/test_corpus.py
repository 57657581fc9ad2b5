"""What searches have found worth keeping: each decoder takes it or refuses it, and raises nothing else."""

import contextlib
from pathlib import Path

import pytest

from fedge.errors import FedgeError
from tests.fuzz.decoders import DECODERS

CORPUS = Path(__file__).with_name("corpus")


@pytest.mark.parametrize("name", DECODERS)
def test_what_was_found_is_taken_or_refused(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert kept
    for path in kept:
        try:
            with contextlib.suppress(FedgeError):
                DECODERS[name](path.read_bytes())
        except BaseException as error:
            error.add_note(str(path))
            raise


def test_the_corpus_is_small_and_of_decoders_that_there_are() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(DECODERS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 1_000_000
