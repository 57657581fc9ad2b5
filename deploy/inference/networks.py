"""The networks of a bundle's candidates, each with a session of its own, in memory or on the disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from deploy.inference.sessions import Provider, Session
from fedge.bundle.manifest import Bundle, matches_part
from fedge.data.problems.maths import Floats
from fedge.data.task import INPUT, LOGITS
from fedge.errors import UpdateRejected


class Networks:
    """The networks of a bundle's candidates: in memory, on the disk until they are wanted, or left out.

    Of those on the disk the last one that ran stays open. Equal candidates share a session. `providers` are the
    execution providers in use, once a network is open.
    """

    def __init__(self, bundle: Bundle, threads: int, providers: Sequence[Provider]) -> None:
        """Begin with all networks left out."""
        self._bundle, self._threads, self._wanted = bundle, threads, providers
        self._in_memory: dict[str, Session] = {}
        self._last: dict[str, Session] = {}
        self._lock = threading.Lock()
        self.used: tuple[int, ...] = ()
        """The candidates that are not left out, ascending."""
        self.providers: tuple[str, ...] = ()

    def hold(self, in_memory: Iterable[int], on_disk: Iterable[int] = ()) -> None:
        """Have some candidates in memory, and others on the disk; leave out the rest."""
        held, open_ones = [*in_memory], self._last | self._in_memory
        self.used = tuple(sorted({*held, *on_disk}))
        digests = {self._bundle.manifest.candidates[k].part.digest: k for k in held}
        self._last, self._in_memory = {}, {d: each for d, each in open_ones.items() if d in digests}
        del open_ones  # before others are opened
        self._in_memory |= {digest: self._open(k) for digest, k in digests.items() if digest not in self._in_memory}

    def compute_logits(self, k: int, x: Floats) -> Floats:
        """Compute logits (n, C) of candidate k, which is not left out.

        Raises:
            UpdateRejected: the candidate is on the disk, and its file has changed since the bundle was verified.
        """
        (logits,) = self._find(k).run((LOGITS,), {INPUT: x})
        return np.asarray(logits)

    def _find(self, k: int) -> Session:
        part = self._bundle.manifest.candidates[k].part
        with self._lock:  # so that threads together have one more in memory
            session = self._in_memory.get(part.digest) or self._last.get(part.digest)
            if session is None:
                self._last = {}
                if not matches_part(path := self._bundle.folder / part.file_name, part):
                    raise UpdateRejected(f"{path} has changed since the bundle was loaded")
                session = self._open(k)
                self._last = {part.digest: session}
        return session

    def _open(self, k: int) -> Session:
        bundle = self._bundle
        parts = [bundle.manifest.candidates[k].part.file_name]
        session = Session(bundle.make_candidate_graph(k), bundle.folder, self._threads, self._wanted, parts=parts)
        self.providers = session.providers
        return session
