"""A device shares the secrets behind its masks, with the cohort that it has seen and no other."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge_agent.privacy.masking import Keys, Session, Shared
from fedge.privacy.masked_sums import Member, make_commitment
from fedge.privacy.shares import combine_shares
from fedge.steps.contract import Declined, Failed
from fedge.steps.masked.mask_shares import SharesMade
from fedge.wire.messages import Why
from tests.support.cohort import SESSION, Cohort
from tests.support.orders import order


def session(cohort: Cohort, k: int) -> Session:
    return Session(cohort.workers[k].make_device(order(cohort.sharing()), cohort.blobs), SESSION)


def test_neighbours_shares_give_back_both_secrets(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    made = cohort.made[2]
    opened = {j: cohort.roster.unseal(session(cohort, j).encryption, 2, j, sealed) for j, sealed in made.sealed.items()}
    some = sorted(opened)[: cohort.roster.threshold]
    kept, keys = session(cohort, 2).load(Shared), session(cohort, 2).load(Keys)
    assert kept is not None
    assert keys is not None
    assert combine_shares({j + 1: opened[j][:33] for j in some}) == kept.seed
    assert combine_shares({j + 1: opened[j][33:] for j in some}) == keys.masking
    assert made.commitment == make_commitment(kept.seed)


def test_asked_again_it_gives_the_same_shares_also_after_a_kill(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    first = cohort.result(0, cohort.sharing())
    assert isinstance(first, SharesMade)
    cohort.workers[0] = cohort.started(0)
    assert cohort.result(0, cohort.sharing()) == first


def test_another_roster_for_the_same_keys_is_refused(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    cohort.share()
    cohort.enrol(list(cohort.roster.members[:5]))
    cohort.workers[0] = cohort.started(0)
    refused = cohort.result(0, cohort.sharing())
    assert isinstance(refused, Failed)
    assert refused.reason == "secrets were shared for another roster"


def test_a_cohort_that_is_too_small_is_declined(tmp_path: Path) -> None:
    for fewest, kind in ((4, SharesMade), (5, Declined)):
        cohort = Cohort(tmp_path / str(fewest), 4, min_cohort=fewest)
        cohort.advertise()
        result = cohort.result(0, cohort.sharing())
        assert isinstance(result, kind)
    assert isinstance(result, Declined)
    assert (result.why, result.reason) == (Why.TOO_FEW, "the cohort has 4 devices, but the owner wants 5")


def test_a_roster_without_the_device_or_with_other_keys_of_it_is_refused(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    cohort.advertise()
    members = list(cohort.roster.members)
    forged = msgspec.structs.replace(members[0], masking=bytes(range(32)))
    for wrong in (
        members[1:],
        [forged, *members[1:]],
        [msgspec.structs.replace(members[0], signing=bytes(range(32))), *members[1:]],
        [Member(id="x", encryption=b"e" * 32, masking=b"m" * 32, signing=b"s" * 32), *members[1:]],
    ):
        cohort.enrol(wrong)
        refused = cohort.result(0, cohort.sharing())
        assert isinstance(refused, Failed)
        assert refused.reason == "the roster does not have this device with its keys"


def test_before_its_keys_nothing_is_shared(tmp_path: Path) -> None:
    cohort = Cohort(tmp_path)
    made_up = [
        Member(id=f"d{k}", encryption=bytes([k]) * 32, masking=bytes([9 + k]) * 32, signing=bytes([18 + k]) * 32)
        for k in range(6)
    ]
    cohort.enrol(made_up)
    refused = cohort.result(0, cohort.sharing())
    assert isinstance(refused, Failed)
    assert "never began" in refused.reason
