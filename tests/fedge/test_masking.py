"""Rosters, their graphs, keys and masks."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chisquare, hypergeom

from fedge.errors import ProtocolError
from fedge.fixed_point import zero
from fedge.masking import DEGREE, Member, Roster, add_pair_mask, commitment, prg, read_roster, too_close, write_roster
from tests.support.contracts import LAYOUT


def keys(n: int) -> list[X25519PrivateKey]:
    return [X25519PrivateKey.from_private_bytes(k.to_bytes(32)) for k in range(1, n + 1)]


def member(k: int, own: X25519PrivateKey) -> Member:
    public = own.public_key().public_bytes_raw()
    return Member(id=f"d{k:04d}", encryption=k.to_bytes(32), masking=public)


def roster_of(n: int) -> Roster:
    fake = [Member(id=f"d{k:04d}", encryption=k.to_bytes(32), masking=(n + k).to_bytes(32)) for k in range(n)]
    return read_roster(write_roster(fake))


# ------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("n", [2, 5, 6, 81, 82, 300])
def test_each_device_has_k_neighbours_and_is_theirs(n: int) -> None:
    roster = roster_of(n)
    graph = [set(roster.neighbours(k)) for k in range(n)]
    assert {len(near) for near in graph} == {roster.degree} == {min(n - 1, DEGREE)}
    assert all(k in graph[j] and j != k for k, near in enumerate(graph) for j in near)
    assert roster.threshold > roster.degree / 2, "no two sets of so many neighbours are disjoint"


def test_who_is_near_whom_is_drawn_from_the_keys() -> None:
    one, other = roster_of(200), roster_of(201)
    assert one.neighbours(0) == roster_of(200).neighbours(0)
    assert one.neighbours(0) != other.neighbours(0)


@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_a_tenth_that_tells_and_a_fifth_that_drops_out_are_withstood(n: int) -> None:
    """Bell et al. (2020): a device with t curious neighbours is seen, one with fewer than t left loses the sum."""
    k, t = DEGREE, DEGREE // 2 + 1
    seen = n * hypergeom.sf(t - 1, n - 1, n // 10, k)
    lost = n * hypergeom.cdf(t - 1, n - 1, n - 1 - n // 5, k)
    apart = n * (n // 10 + n // 5) ** k / n**k  # somebody whose neighbours all tell or are gone
    assert max(seen, apart) < 2**-53
    assert lost < 2**-15


def test_parts_that_no_masks_join_are_found() -> None:
    roster = roster_of(300)
    circle = roster._circle
    assert roster.connected(range(300))
    assert roster.connected(circle[:50])
    assert roster.connected(circle[10:200:40]), "each is the fortieth from the last"
    assert not roster.connected([*circle[:5], *circle[100:105]])
    assert not roster.connected(circle[0:205:41])
    assert roster_of(20).connected([0, 19]), "everybody is everybody's neighbour"


# ------------------------------------------------------------------------------------------------------- the roster


def test_a_roster_is_in_order_of_the_ids() -> None:
    fake = [Member(id=i, encryption=bytes([k]) * 32, masking=bytes([9 - k]) * 32) for k, i in enumerate("cab")]
    roster = read_roster(write_roster(fake))
    assert [m.id for m in roster.members] == ["a", "b", "c"]
    assert (roster.position("b"), roster.position("x"), roster.ids([2, 0])) == (1, None, ("c", "a"))


@pytest.mark.parametrize(
    "members",
    [
        [("a", 1, 2), ("a", 3, 4)],
        [("a", 1, 2), ("b", 3, 1)],
        [("a", 1, 1), ("b", 3, 4)],
        [("a", 1, 2)],
    ],
    ids=["id twice", "key of another", "key for both", "alone"],
)
def test_what_is_no_roster(members: list[tuple[str, int, int]]) -> None:
    made = [Member(id=i, encryption=bytes([e]) * 32, masking=bytes([m]) * 32) for i, e, m in members]
    with pytest.raises(ProtocolError, match="malformed"):
        read_roster(write_roster(made))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01\x02", write_roster([])], ids=len)
def test_bytes_that_are_no_roster(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_roster(data)


# ---------------------------------------------------------------------------------------------------- keys and masks


def pair() -> tuple[Roster, list[X25519PrivateKey]]:
    own = keys(3)
    members = [
        Member(
            id=f"d{k}", encryption=mine.public_key().public_bytes_raw(), masking=theirs.public_key().public_bytes_raw()
        )
        for k, (mine, theirs) in enumerate(zip(own, keys(6)[3:], strict=True))
    ]
    return read_roster(write_roster(members)), own


def test_masks_of_a_pair_cancel() -> None:
    roster, _ = pair()
    first, second = keys(6)[3:5]
    seed = roster.pair_seed(first, 1)
    assert seed == roster.pair_seed(second, 0)
    total = zero(LAYOUT)
    add_pair_mask(total, 0, 1, seed, LAYOUT)
    assert total.to_bytes() == prg(seed, LAYOUT).to_bytes()
    add_pair_mask(total, 1, 0, seed, LAYOUT)
    assert total.to_bytes() == zero(LAYOUT).to_bytes()


def test_another_roster_gives_another_secret() -> None:
    roster, _ = pair()
    other = Roster(roster.members, "1" * 64)
    assert roster.pair_seed(keys(4)[3], 1) != other.pair_seed(keys(4)[3], 1)


def test_shares_are_for_one_device_in_one_direction() -> None:
    roster, own = pair()
    sealed = roster.seal(own[0], 0, 1, b"s" * 66)
    assert len(sealed) == 82
    assert roster.unseal(own[1], 0, 1, sealed) == b"s" * 66
    assert roster.unseal(own[2], 0, 1, sealed) is None
    assert roster.unseal(own[1], 0, 2, sealed) is None
    assert roster.unseal(own[0], 1, 0, sealed) is None
    assert roster.unseal(own[1], 0, 1, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert Roster(roster.members, "1" * 64).unseal(own[1], 0, 1, sealed) is None


def test_a_mask_is_uniform() -> None:
    """Bytes of 100 masks: chi-squared with 255 degrees of freedom; fails by chance once in 10^6 runs."""
    counted = np.zeros(256)
    for k in range(100):
        counted += np.bincount(np.frombuffer(prg(k.to_bytes(32), LAYOUT).to_bytes(), np.uint8), minlength=256)
    assert chisquare(counted).pvalue > 1e-6


def test_a_commitment_is_to_one_seed() -> None:
    assert commitment(bytes(32)) == commitment(bytes(32)) != commitment(bytes(31) + b"\1")


# -------------------------------------------------------------------------------------------------------- which sums


@pytest.mark.parametrize(
    ("summed", "earlier", "reason"),
    [
        ("abcde", [], ""),
        ("abcd", [], "a sum of 4 devices, 5 are the fewest"),
        ("abcde", ["abcde"], ""),
        ("abcdef", ["abcde"], "differs by 1 devices"),
        ("abcdefghi", ["abcde"], "differs by 4 devices"),
        ("abcdefghij", ["abcde"], ""),
        ("abcfg", ["abcde"], "differs by 4 devices"),
        ("abfgh", ["abcde"], ""),
        ("vwxyz", ["abcde", "vwxyzabcd"], "differs by 4 devices"),
    ],
)
def test_which_sums_show_too_little_of_too_few(summed: str, earlier: list[str], reason: str) -> None:
    assert (reason in too_close(summed, earlier, 5)) if reason else too_close(summed, earlier, 5) == ""
