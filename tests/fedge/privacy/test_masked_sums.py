"""Rosters, their graphs, keys and masks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import product

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.stats import chisquare, hypergeom

from fedge.errors import ProtocolError
from fedge.privacy.masked_sums import (
    DEGREE,
    Member,
    Roster,
    Sums,
    add_pair_mask,
    expand_seed,
    make_commitment,
    read_positions,
    read_roster,
    read_signatures,
    write_positions,
    write_roster,
    write_signatures,
)
from fedge.steps.masked.mask_shares import MAX_COHORT, MIN_COHORT
from fedge.tensors.fixed_point import make_zero
from fedge.wire.messages import BlobRef
from tests.support.contracts import LAYOUT

NAMES = "abcdefghijklmnopqrs"


def sums_of(*sums: Iterable[str]) -> Sums:
    return reduce(Sums.with_sum, sums, Sums())


def keys(n: int) -> list[X25519PrivateKey]:
    return [X25519PrivateKey.from_private_bytes(k.to_bytes(32)) for k in range(1, n + 1)]


def member(i: str, *made_up: int) -> Member:
    encryption, masking, signing = (key.to_bytes(32) for key in made_up)
    return Member(id=i, encryption=encryption, masking=masking, signing=signing)


def roster_of(n: int) -> Roster:
    return read_roster(write_roster([member(f"d{k:04d}", k, n + k, 2 * n + k) for k in range(n)]))


# ------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("n", [2, 5, 6, 81, 82, 300])
def test_each_device_has_k_neighbours_and_is_theirs(n: int) -> None:
    roster = roster_of(n)
    graph = [set(roster.get_neighbours(k)) for k in range(n)]
    assert {len(near) for near in graph} == {roster.degree} == {min(n - 1, DEGREE)}
    assert all(k in graph[j] and j != k for k, near in enumerate(graph) for j in near)
    assert roster.threshold > roster.degree / 2, "no two sets of so many neighbours are disjoint"


def test_who_is_near_whom_is_drawn_from_the_keys() -> None:
    one, other = roster_of(200), roster_of(201)
    assert one.get_neighbours(0) == roster_of(200).get_neighbours(0)
    assert one.get_neighbours(0) != other.get_neighbours(0)


@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_a_tenth_that_tells_and_a_fifth_that_drops_out_are_withstood(n: int) -> None:
    """Bell et al. (2020): a device with t curious neighbours is seen, one with fewer than t left loses the sum."""
    k, t = DEGREE, DEGREE // 2 + 1
    seen = n * hypergeom.sf(t - 1, n - 1, n // 10, k)
    few = n * hypergeom.sf(t - MIN_COHORT, n - 1, n // 10, k)  # of t neighbours in a sum all but four tell, or more do
    lost = n * hypergeom.cdf(t - 1, n - 1, n - 1 - n // 5, k)
    assert seen < 2**-53
    assert few < 2**-40
    assert lost < 2**-15


def test_who_has_few_neighbours_in_a_sum_is_found() -> None:
    roster = roster_of(300)
    circle = roster._circle
    assert roster.are_joined(range(300))
    assert roster.are_joined([k for place, k in enumerate(circle) if place % 3]), "about 53 of 80 each"
    assert not roster.are_joined(circle[::2]), "40 of 80 each"
    assert not roster.are_joined(circle[:150]), "the first and the last have 40"
    near = set(roster.get_neighbours(circle[0]))
    assert roster.are_joined([k for k in range(300) if k not in sorted(near)[:39]])
    assert not roster.are_joined([k for k in range(300) if k not in sorted(near)[:40]])
    assert roster_of(20).are_joined([0, 19]), "everybody is everybody's neighbour"


@pytest.mark.parametrize("n", [82, 300])
def test_in_a_joined_sum_masks_join_all(n: int) -> None:
    """Random sums: without an arc of the circle, and without some others."""
    roster, rng = roster_of(n), np.random.default_rng(n)
    found = 0
    for _ in range(200):
        first, length = rng.integers(n), rng.integers(n // 2)
        there = [k for place, k in enumerate(roster._circle) if (place - first) % n >= length and rng.random() < 0.8]
        if there and roster.are_joined(there):
            found += 1
            reached, edge = {there[0]}, {there[0]}
            while edge:
                edge = {peer for k in edge for peer in roster.get_neighbours(k)} & set(there) - reached
                reached |= edge
            assert reached == set(there)
    assert 0 < found < 200


# ------------------------------------------------------------------------------------------------------- the roster


def test_a_roster_is_in_order_of_the_ids() -> None:
    roster = read_roster(write_roster([member(i, k, 9 - k, 20 + k) for k, i in enumerate("cab")]))
    assert [m.id for m in roster.members] == ["a", "b", "c"]
    assert (roster.find_position("b"), roster.find_position("x"), roster.get_ids([2, 0])) == (1, None, ("c", "a"))


@pytest.mark.parametrize(
    "members",
    [
        [("a", 1, 2, 3), ("a", 4, 5, 6)],
        [("a", 1, 2, 3), ("b", 4, 1, 6)],
        [("a", 1, 2, 3), ("b", 4, 5, 3)],
        [("a", 1, 1, 3), ("b", 4, 5, 6)],
        [("a", 1, 2, 3)],
    ],
    ids=["id twice", "key of another", "signs as another", "key for both", "alone"],
)
def test_what_is_no_roster(members: list[tuple[str, int, int, int]]) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_roster(write_roster([member(*one) for one in members]))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01\x02", write_roster([])], ids=len)
def test_bytes_that_are_no_roster(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_roster(data)


# ---------------------------------------------------------------------------------------------------- keys and masks


SIGNING = [Ed25519PrivateKey.from_private_bytes(k.to_bytes(32)) for k in range(1, 4)]


def pair() -> tuple[Roster, list[X25519PrivateKey]]:
    own = keys(3)
    members = [
        Member(
            id=f"d{k}",
            encryption=mine.public_key().public_bytes_raw(),
            masking=theirs.public_key().public_bytes_raw(),
            signing=SIGNING[k].public_key().public_bytes_raw(),
        )
        for k, (mine, theirs) in enumerate(zip(own, keys(6)[3:], strict=True))
    ]
    return read_roster(write_roster(members)), own


def test_masks_of_a_pair_cancel() -> None:
    roster, _ = pair()
    first, second = keys(6)[3:5]
    seed = roster.derive_pair_seed(first, 0, 1, "training")
    assert seed == roster.derive_pair_seed(second, 1, 0, "training")
    total = make_zero(LAYOUT)
    add_pair_mask(total, 0, 1, seed, LAYOUT)
    assert total.to_bytes() == expand_seed(seed, LAYOUT).to_bytes()
    add_pair_mask(total, 1, 0, seed, LAYOUT)
    assert total.to_bytes() == make_zero(LAYOUT).to_bytes()


def test_another_roster_or_training_gives_another_secret() -> None:
    roster, _ = pair()
    other = Roster(roster.members, "1" * 64)
    seed = roster.derive_pair_seed(keys(4)[3], 0, 1, "training")
    assert seed != other.derive_pair_seed(keys(4)[3], 0, 1, "training")
    assert seed != roster.derive_pair_seed(keys(4)[3], 0, 1, "another")


def test_a_key_that_makes_the_secrets_of_another_cancels_none_of_its_masks() -> None:
    """1 / u is the point u plus one of order two, which X25519 takes for the same; nobody need know its private key."""
    roster, _ = pair()
    third = keys(6)[5]
    twin = pow(int.from_bytes(roster.members[0].masking, "little"), -1, 2**255 - 19).to_bytes(32, "little")
    genuine = X25519PublicKey.from_public_bytes(roster.members[0].masking)
    assert third.exchange(X25519PublicKey.from_public_bytes(twin)) == third.exchange(genuine)
    members = [roster.members[0], replace(roster.members[1], masking=twin), roster.members[2]]
    mirrored = read_roster(write_roster(members))
    assert mirrored.derive_pair_seed(third, 2, 0, "training") != mirrored.derive_pair_seed(third, 2, 1, "training")


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
        counted += np.bincount(np.frombuffer(expand_seed(k.to_bytes(32), LAYOUT).to_bytes(), np.uint8), minlength=256)
    assert chisquare(counted).pvalue > 1e-6


def test_a_commitment_is_to_one_seed() -> None:
    assert make_commitment(bytes(32)) == make_commitment(bytes(32)) != make_commitment(bytes(31) + b"\1")


# -------------------------------------------------------------------------------------------------------- statements

SHARERS, SUMMED = BlobRef(digest="2" * 64, size_bytes=1), BlobRef(digest="3" * 64, size_bytes=1)


def test_a_statement_is_of_one_device_about_one_thing() -> None:
    roster, _ = pair()
    masked, summing = roster.make_mask_statement(SHARERS), roster.make_sum_statement(SHARERS, SUMMED)
    other = Roster(roster.members, "1" * 64)
    statements = {masked, summing, roster.make_mask_statement(SUMMED), roster.make_sum_statement(SUMMED, SHARERS)}
    statements |= {other.make_mask_statement(SHARERS), other.make_sum_statement(SHARERS, SUMMED)}
    assert len(statements) == 6
    signatures = {k: key.sign(masked) for k, key in enumerate(SIGNING)}
    for statement in statements:
        assert roster.find_signers(statement, signatures) == ({0, 1, 2} if statement == masked else set())
    assert roster.find_signers(masked, dict.fromkeys(range(4), signatures[0])) == {0}, "of four, of whom one is nobody"
    assert roster.find_signers(masked, {0: signatures[0][:-1] + bytes([signatures[0][-1] ^ 1])}) == set()


def test_positions_and_signatures_are_read_as_written() -> None:
    roster = roster_of(300)
    for positions in ((), (0,), (0, 127, 128, 299)):
        assert read_positions(write_positions(reversed(positions)), roster) == positions
    assert read_positions(write_positions(range(300)), roster) == tuple(range(300))
    assert read_signatures(write_signatures({3: b"b" * 64, 1: b"a" * 64})) == {1: b"a" * 64, 3: b"b" * 64}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x92\x01", b"\x91\xff", b"\x92\x02\x01", b"\x92\x01\x01", b"\x91\xcc\x01",
        b"\x91\xcd\x01\x2c", b"\x90\x90",
    ],
    ids=["empty", "nothing", "cut", "negative", "not ascending", "twice", "longer than needed", "beyond", "more"],
)  # fmt: skip
def test_bytes_that_are_no_positions(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_positions(data, roster_of(300))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x90", b"\x81\x01\xc4\x01a", b"\x81\xff\xc4\x40" + bytes(64)], ids=len
)
def test_bytes_that_are_no_signatures(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        read_signatures(data)


def test_the_lists_of_the_largest_cohort_are_read() -> None:
    roster = roster_of(MAX_COHORT)
    assert read_positions(write_positions(range(MAX_COHORT)), roster) == tuple(range(MAX_COHORT))
    assert len(read_signatures(write_signatures(dict.fromkeys(range(MAX_COHORT), bytes(64))))) == MAX_COHORT


@pytest.mark.parametrize(
    ("n", "needed", "helpers"),
    [(5, 4, 3), (6, 5, 4), (7, 5, 3), (8, 6, 4), (9, 7, 5), (10, 7, 4), (12, 9, 6), (100, 67, 34), (1000, 667, 334)],
)
def test_more_than_two_thirds_confirm(n: int, needed: int, helpers: int) -> None:
    """`helpers`: those that must confirm two sums for both to be opened."""
    roster = roster_of(n)
    assert roster.explain_dispute(range(n), range(needed)) == ""
    reason = f"{needed - 1} of {n} devices of the cohort have confirmed the sum, {needed} are needed"
    assert roster.explain_dispute(range(n), range(needed - 1)) == reason
    assert 2 * needed - n == helpers > n / 3


def test_more_than_two_thirds_of_the_sum_confirm() -> None:
    roster = roster_of(20)
    summed, others = range(9), range(9, 20)
    assert roster.explain_dispute(summed, [*summed[:7], *others]) == ""
    assert roster.explain_dispute(summed, [*summed[:6], *others]) == (
        "6 of 9 devices of the sum have confirmed the sum, 7 are needed"
    )


def test_two_sums_that_are_too_close_are_confirmed_by_some_in_both() -> None:
    """Whatever their cohorts: who has confirmed the first refuses the second."""
    for n_one, n_other in product(range(5, 60), repeat=2):
        for apart in range(1, 5):
            both, odd = divmod(n_one + n_other - apart, 2)
            if not odd and both <= min(n_one, n_other):
                silent = sum(n - (2 * n // 3 + 1) for n in (n_one, n_other))
                assert both - silent >= 1
                assert both - silent > (both - apart) / 3


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
    found = sums_of(*earlier).explain_too_close(summed, 5)
    assert (reason in found) if reason else found == ""


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), max_size=8), st.sets(st.sampled_from(NAMES)))
def test_sums_in_bits_are_the_sets_that_they_are_made_of(sums: list[set[str]], more: set[str]) -> None:
    """Against sets, for every number of devices that an owner may want."""
    packed = sums_of(*sums)
    assert list(packed) == list(dict.fromkeys(tuple(sorted(each)) for each in sums))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Sums) == packed
    apart = {len(more ^ each) for each in sums} - {0}
    for fewest in range(1, len(NAMES) + 1):
        assert bool(packed.explain_too_close(more, fewest)) == (
            len(more) < fewest or min(apart, default=fewest) < fewest
        )


def test_two_hundred_sums_of_half_of_ten_thousand_devices_take_half_a_megabyte() -> None:
    """A list of their names took 10 MB."""
    names, rng = [f"dev-{k:04d}" for k in range(10_000)], np.random.default_rng(0)
    sums = sums_of(*(rng.permutation(names)[:5_000].tolist() for _ in range(200)))
    assert len(msgspec.msgpack.encode(sums)) < 500_000


def test_a_run_of_which_no_more_sums_can_be_remembered_repeats_those_that_there_were(monkeypatch) -> None:
    sums = sums_of("abcde", "fghij")
    monkeypatch.setattr("fedge.privacy.masked_sums.MAX_REMEMBERED", 11)
    assert sums.explain_too_close("vwxyz", 5) == "2 different sums in this run, no more can be remembered"
    assert sums.explain_too_close("fghij", 5) == ""
