"""Score at work: right and wrong among answers that were labelled later, by class and over time."""

from __future__ import annotations

import sqlite3
from typing import Final

from msgspec import Struct

MAX_ANSWERS: Final = 50_000
"""Most answers that are counted, some 5 MB, and again of sensitive samples; the oldest go first."""
DAY_S: Final = 86400.0


class Answered(Struct, frozen=True):
    """What a bundle answered to a sample: the class number, and the bundle's release."""

    label: int
    release: int


class AnswerCount(Struct, frozen=True, kw_only=True):
    """Answers of a bundle to samples of one class (`label`) that came in the time from `begin`."""

    begin: float
    release: int
    label: int
    right: int
    wrong: int


def record_answer(
    db: sqlite3.Connection, digest: bytes, label: int, answered: Answered, *, sensitive: bool, at: float
) -> None:
    """Record an answer whose true label came; a sample counts once for each release."""
    nth = count_next(db, sensitive=sensitive)
    db.execute(
        "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
        (digest, sensitive, label, answered.label, answered.release, at, nth),
    )
    db.execute("DELETE FROM answers WHERE sensitive = ? AND nth <= ?", (sensitive, nth - MAX_ANSWERS))


def count_next(db: sqlite3.Connection, *, sensitive: bool) -> int:
    """Return the number of the next answer; those to sensitive samples have numbers of their own."""
    return int(
        db.execute("SELECT COALESCE(MAX(nth), 0) + 1 FROM answers WHERE sensitive = ?", (sensitive,)).fetchone()[0]
    )


def move_answers(
    db: sqlite3.Connection, digest: bytes, label: int, *, sensitive: bool, to_label: int, to_sensitive: bool
) -> None:
    """Count the answers to a sample under another label or mark."""
    db.execute(
        "UPDATE OR REPLACE answers SET label = ?, sensitive = ?, nth = ? "
        "WHERE digest = ? AND label = ? AND sensitive = ?",
        (to_label, to_sensitive, count_next(db, sensitive=to_sensitive), digest, label, sensitive),
    )


def count_by_class(db: sqlite3.Connection, *, since: float, every_s: float, with_sensitive: bool) -> list[AnswerCount]:
    """Count the answers since a time, by interval, release and class."""
    rows = db.execute(
        "SELECT CAST(at / ? AS INTEGER) AS period, release, label, SUM(answered = label), SUM(answered <> label) "
        "FROM answers WHERE at >= ? AND sensitive <= ? GROUP BY period, release, label ORDER BY period, release, label",
        (every_s, since, with_sensitive),
    )
    return [
        AnswerCount(begin=period * every_s, release=release, label=label, right=right, wrong=wrong)
        for period, release, label, right, wrong in rows
    ]


def count_newest(db: sqlite3.Connection, n: int, *, release: int | None, with_sensitive: bool) -> tuple[int, int]:
    """Return how many of the newest n answers, of a release if given, were right and wrong."""
    right, wrong = db.execute(
        "SELECT COALESCE(SUM(answered = label), 0), COALESCE(SUM(answered <> label), 0) FROM (SELECT * FROM answers "
        "WHERE sensitive <= ? AND (? IS NULL OR release = ?) ORDER BY at DESC, nth DESC LIMIT ?)",
        (with_sensitive, release, release, n),
    ).fetchone()
    return right, wrong
