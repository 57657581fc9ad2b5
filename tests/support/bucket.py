"""A stand-in for S3: moto's server, which keeps buckets in memory. It has an environment of its own (.ci/run)."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

OURS: Final = Path(__file__).parents[2] / ".venv-moto" / "bin" / "moto_server"
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "fedge",
    "AWS_SECRET_ACCESS_KEY": "fedge",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """A server on a free port; its address. The environment names it, for this process and its children."""
    program = shutil.which("moto_server") or shutil.which(OURS) or pytest.skip("moto's server is not installed")
    with (
        subprocess.Popen([program, "-p", "0"], stderr=subprocess.PIPE, text=True) as server,
        pytest.MonkeyPatch.context() as environment,
    ):
        try:
            assert server.stderr is not None
            address = next(line for line in server.stderr if "Running on" in line).split()[-1]
            for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": address}.items():
                environment.setenv(name, value)
            yield address
        finally:
            server.terminate()


def new_bucket(server: str) -> str:
    """Address of a folder in an empty bucket on a server."""
    name = uuid.uuid4().hex
    urllib.request.urlopen(urllib.request.Request(f"{server}/{name}", method="PUT")).close()
    return f"s3://{name}/shop"
