"""A real PostgreSQL in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = max(map(str, Path("/usr/lib/postgresql").glob("*/bin")), default="")  # Debian's are not on PATH


def program(name: str) -> str:
    """Where one of its programs is; the test is skipped where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=PROGRAMS)
    return found or pytest.skip("PostgreSQL is not installed")


def new_database(server: str) -> str:
    """Address of an empty database on a server."""
    name = f"d{uuid.uuid4().hex}"
    subprocess.run([program("createdb"), f"--maintenance-db={server}", name], check=True)
    return f"{server.rpartition('/')[0]}/{name}"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A server on a free port, for everybody on this machine; its address."""
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    with tempfile.TemporaryDirectory(prefix="fedge-postgres-") as name, socket.socket() as free:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()

        def run(*command: str) -> None:
            subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)

        data = str(folder / "data")
        run(initdb, "-D", data, "-A", "trust", "-U", "fedge", "--no-sync", "-E", "UTF8")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        run(pg_ctl, "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            yield f"postgresql://fedge@127.0.0.1:{port}/postgres"
        finally:
            run(pg_ctl, "-D", data, "-m", "immediate", "stop")
