from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.provision.members import Member, Members, read_members, write_members
from fedge.errors import ConfigError
from fedge.identity.names import Role


def test_who_is_on_the_list_in_this_role_and_not_revoked_is_admitted(tmp_path: Path) -> None:
    cam = Member(role=Role.DEVICE, serial="a1", not_after="2030-01-31T00:00:00Z")
    gone = Member(role=Role.DEVICE, serial="a2", not_after="2030-01-31T00:00:00Z", revoked="2029-01-31T00:00:00Z")
    write_members(tmp_path / "members.json", Members(federation="shop", members={"cam1": cam, "cam2": gone}))
    members = read_members(tmp_path / "members.json")
    assert members.federation == "shop"
    assert members.admits("cam1", Role.DEVICE)
    assert not members.admits("cam1", Role.COORDINATOR)
    assert not members.admits("cam2", Role.DEVICE)
    assert not members.admits("cam3", Role.DEVICE)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"federation": "a b"}', b"\xff", b"[" * 100_000])
def test_what_is_no_list_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "members.json"
    with pytest.raises(ConfigError, match="is not there"):
        read_members(file)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="no list of members"):
        read_members(file)
