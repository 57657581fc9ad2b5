"""Kinds of tests, one thread for all numerics, logging as it was after each test, and fixtures of real brokers."""

from __future__ import annotations

import os

# As the agent does, and before anybody imports torch or numpy: several threads on small networks mostly wait for each
# other. Child processes inherit it.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Hundreds of processes import fedge, and each pytest worker all tests: they compile the sources once, whatever this
# machine is told to do otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import faulthandler
import functools
import gc
import logging
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from fedge.commands.broker import LocalBroker, find_mosquitto
from tests.deploy.faults import forced, free_disk, not_installed, python_at
from tests.support.broker import BROKERS, local_broker
from tests.support.bucket import new_bucket, s3
from tests.support.dealing import deal
from tests.support.postgres import new_database, postgres

__all__ = ["forced", "free_disk", "not_installed", "python_at"]

sys.dont_write_bytecode = False

# No test measures how fast this machine is: others may be at work on it.
hypothesis.settings.register_profile("fedge", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("fedge")

HANGS_S = 180.0
"""Time for a test that was stopped to clean up."""
KINDS = ("unit", "broker", "process", "statistical")
BROKER_FIXTURES = {"broker", "one_broker", "mosquitto", "mosquitto_program"}
PROCESS_FOLDERS = ("benchmarks", "faults", "integration")


def kind_of(item: pytest.Item) -> str:
    """The kind of a test: its own mark, otherwise its folder, otherwise the broker that it asks for."""
    for kind in KINDS:
        if item.get_closest_marker(kind):
            return kind
    if item.path.parent.name in PROCESS_FOLDERS:
        return "process"
    return "unit" if BROKER_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) else "broker"


@pytest.hookimpl(wrapper=True)  # kinds before tests are chosen by mark, their sequence afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Give each test exactly one of the four kinds; what takes longest begins first, so that nobody waits for it."""
    for item in items:
        item.add_marker(kind_of(item))
    yield
    names = [getattr(item, "originalname", item.name) for item in items]
    items[:] = [items[k] for k in deal(names, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Called once: what is imported and collected stays, so nobody need look for garbage in it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class Progress:
    """Writes which test failed, and with what, as soon as it did; of a run that is cut off, what was under way."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._under_way: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called when a test begins, in the process that the user sees, like the others."""
        self._under_way[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext
            self._writer.line(f"\n{report.nodeid} ({report.when}, {report.duration:.0f} s): {message[:300]}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Called when a test has ended."""
        self._under_way.pop(nodeid, None)

    def pytest_keyboard_interrupt(self) -> None:
        """Called before the summary of a run that is cut off."""
        for nodeid, began in self._under_way.items():
            self._writer.line(f"\n{nodeid} was under way for {time.monotonic() - began:.0f} s")


@pytest.hookimpl(trylast=True)  # after the terminal
def pytest_configure(config: pytest.Config) -> None:
    """Write progress in the process that has the terminal."""
    if config.pluginmanager.has_plugin("terminalreporter"):
        config.pluginmanager.register(Progress(config.get_terminal_writer()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End this process if a test hangs beyond its timeout, as one can that cleans up: pytest-timeout acts once."""
    marked = item.get_closest_marker("timeout")
    seconds = marked.args[0] if marked else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + HANGS_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test that runs `fedge` in this process sends all log lines to its own standard error, which is then closed."""
    root, ours = logging.getLogger(), logging.getLogger("fedge")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(params=BROKERS)
async def broker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalBroker]:
    """A fresh broker on a free port, once as Mosquitto (MQTT 5) and once as amqtt (3.1.1); tests may kill it."""
    if request.param == "amqtt":  # it never answers MQTT 5: no need to wait long for that in each test
        monkeypatch.setattr("fedge.wire.connection.connection.SILENCE_S", 0.3)
    async with local_broker(request.param, tmp_path) as running:
        yield running


@pytest.fixture
async def one_broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    """A fresh broker of the kind that this machine has, for tests to which the kind does not matter."""
    async with local_broker("auto", tmp_path) as running:
        yield running


@pytest.fixture
def mosquitto_program() -> str:
    """Where Mosquitto is, for tests that start it in their own way; skipped where it is not installed."""
    program = find_mosquitto()
    if program is None:
        pytest.skip("mosquitto is not installed")
    return program


@pytest.fixture
async def mosquitto(mosquitto_program: str, tmp_path: Path) -> AsyncIterator[LocalBroker]:
    """A fresh Mosquitto, for tests of what only MQTT 5 has."""
    async with local_broker("mosquitto", tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """Address of a PostgreSQL server that all tests share; skipped where it is not installed."""
    with postgres() as address:
        yield address


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of a stand-in for S3 that all tests share; skipped where it is not installed."""
    with s3() as address:
        yield address


@pytest.fixture
def bucket(s3_server: str) -> str:
    """Address of an empty bucket."""
    return new_bucket(s3_server)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """Where the tables of a store are, once in a file of its home and once on a server."""
    return new_database(request.getfixturevalue("postgresql")) if request.param == "postgresql" else None


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Called with a name and what it holds: a module of a user, importable for as long as the test runs."""

    def made(name: str, **content: object) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return made


@pytest.fixture
def sensors(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with functions of psutil and what they return or raise; None: this system has no such function."""

    def answer(reading: object) -> object:
        if isinstance(reading, Exception):
            raise reading
        return reading

    def says(**readings: object) -> None:
        for name, reading in readings.items():
            if reading is None:
                monkeypatch.delattr(psutil, name, raising=False)
            else:
                monkeypatch.setattr(psutil, name, functools.partial(answer, reading), raising=False)

    return says


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that are read may take next to no memory."""
    monkeypatch.setattr("fedge.data.npz.MEMORY_SHARE", 1e-9)


@pytest.fixture
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loses the broker tries it again at once."""
    monkeypatch.setattr("fedge.wire.connection.connector.BACKOFF_BASE_S", 0.0)


@pytest.fixture
def fails_on_sevens(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime fails on the samples all of whose values are 7."""
    import export.parity

    real = export.parity.run_graph

    def spoiled(graph: bytes, folder: Path, x: Any) -> Any:
        p, *others = real(graph, folder, x)
        p[(x == 7).reshape(len(x), -1).all(axis=1)] = float("nan")
        return [p, *others]

    monkeypatch.setattr(export.parity, "run_graph", spoiled)
