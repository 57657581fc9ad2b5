"""A clock that tests set: this process, its devices and its repositories go by it; files keep the true time."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace

import pytest


class Clock:
    """`ahead`: of the true time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = timedelta(0)
        true, clock = time.time, self

        class Moved(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.now(tz) + clock.ahead

        patch.setattr(time, "time", lambda: true() + clock.ahead.total_seconds())
        patch.setattr("export.signing.datetime", Moved)
        tuf = SimpleNamespace(datetime=Moved, timezone=SimpleNamespace(utc=UTC))
        patch.setattr("tuf.ngclient._internal.trusted_metadata_set.datetime", tuf)

    def advance(self, **by: float) -> None:
        """Set it forward, or back, as `timedelta`."""
        self.ahead += timedelta(**by)
