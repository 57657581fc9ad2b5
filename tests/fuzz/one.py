"""One decoder under Atheris, until libFuzzer ends the process: python -m tests.fuzz.one NAME [FLAGS OF LIBFUZZER]."""

import contextlib
import logging
import sys

import atheris

OURS = ["fedge", "deploy", "edge_agent", "coordinator.rollout"]
PARSERS = ["tuf", "zipfile", "tomllib", "numpy.lib._format_impl"]

with atheris.instrument_imports(include=OURS + PARSERS):
    from fedge.errors import FedgeError
    from tests.fuzz.decoders import DECODERS


def main() -> None:
    """Never returns."""
    logging.disable(logging.CRITICAL)
    decoder = DECODERS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        with contextlib.suppress(FedgeError):
            decoder(data)

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
