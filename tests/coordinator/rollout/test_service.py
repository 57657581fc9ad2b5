"""What the supervisor knows of a release and of requests; at work: tests/integration/test_rollout.py."""

import os

import pytest

from coordinator.rollout.decision import Plan
from coordinator.rollout.folder import Folder
from coordinator.rollout.service import Release, Supervisor
from export.signing import Repository
from fedge.bundle.manifest import BRANCH, INT8
from fedge.errors import ConfigError, ProtocolError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import make_speaker
from fedge.system.files import compute_digest
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Health, Phase, encode_message
from fedge.wire.topics import Topics
from tests.deploy.bundles import variant
from tests.support.identities import Authority

PLAN = Plan(id="r", target="2/manifest.json", release=2, digest="a" * 64)


@pytest.fixture
def repo(tmp_path):
    graph = b"\x08\x08"  # a model of IR version 8, without a graph
    named = {"digest": compute_digest(graph), "size_bytes": len(graph)}
    bundle = variant(tmp_path / "bundle", release=2, branch=named, int8=named)
    for name in (BRANCH, INT8):
        (bundle / name).write_bytes(graph)
    Repository.make(tmp_path / "repo").add(bundle)
    return tmp_path / "repo"


def release(repo):
    return Release(Repository(repo), repo, "2/manifest.json")


def test_it_serves_what_it_announced_and_nothing_else(repo, tmp_path):
    found = release(repo)
    assert all(found.find_file(ref.digest) is not None for ref in found.metadata.values())
    assert all(found.find_file(part.digest).is_file() for part in found.manifest.files.values())

    other = next((repo / "keys").iterdir()).read_bytes()
    stranger = Repository(repo).parts.put(other)
    assert found.find_file(stranger) is None


def test_new_signatures_are_announced(repo):
    found = release(repo)
    before = found.metadata
    found.refresh()
    assert found.metadata is before

    Repository(repo).renew()
    os.utime(repo / "metadata" / "timestamp.json", ns=(1, 1))
    found.refresh()

    assert found.metadata["timestamp.json"] != before["timestamp.json"]
    assert found.find_file(found.metadata["timestamp.json"].digest) is not None


def test_what_is_signed_again_while_it_is_read_is_read_again(repo, monkeypatch):
    found, named, renewed = release(repo), Repository.find_files, []

    def and_then_renewed(self, target):
        files = named(self, target)
        if not renewed:
            renewed.append(Repository(repo).renew())
        return files

    monkeypatch.setattr(Repository, "find_files", and_then_renewed)
    Repository(repo).renew()
    found.refresh()

    assert renewed
    assert found.metadata == release(repo).metadata


def test_a_part_that_is_gone_is_not_served(repo):
    found = release(repo)
    Repository(repo).parts.remove(found.manifest.gate.digest)
    assert found.find_file(found.manifest.gate.digest) is None


def test_a_release_that_no_device_could_take_is_not_begun(repo):
    part = release(repo).manifest.gate.digest
    path = Repository(repo).parts.get_path(part)
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\xff\x00\xff")
    with pytest.raises(ConfigError, match=rf"is damaged: delete .*{part}, and `fedge release add`"):
        release(repo)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        release(repo)


async def test_without_the_key_that_signs_announcements_nothing_begins(repo):
    for key in (repo / "keys").glob("timestamp.*"):
        key.unlink()
    plan = Plan(id="r", target="2/manifest.json", release=2, digest="a" * 64)
    supervisor = Supervisor(Folder(repo), release(repo), plan, BrokerSettings("localhost", 1), "shop", print)
    with pytest.raises(ConfigError, match="the key of role timestamp"):
        await supervisor.run()
    assert Folder(repo).read() is None


def test_no_such_release(repo):
    with pytest.raises(ConfigError, match=r"2/manifest\.json"):
        Release(Repository(repo), repo, "3/manifest.json")


async def test_with_certificates_it_believes_what_devices_have_signed_and_nothing_else(repo, tmp_path):
    authority = Authority(tmp_path / "authority", "shop")
    settings = BrokerSettings("localhost", 1, **authority.issue("rollout", Role.ROLLOUT))
    supervisor = Supervisor(Folder(repo), release(repo), PLAN, settings, "shop", lambda event, fields: None)
    device = make_speaker(
        BrokerSettings("localhost", 1, **authority.issue("cam1")),
        Subject("shop", Role.DEVICE, "cam1"),
        tmp_path / "cam1",
    )
    topic = Topics("shop").make_agent_topic("cam1", "health")
    said = encode_message(Health(device_id="cam1", at=0.0, phase=Phase.SERVING, release=1))
    with pytest.raises(ProtocolError, match="unsigned"):
        await supervisor._on_health(Inbound(topic, said, retained=False))
    signed = device.seal(topic, said)
    await supervisor._on_health(Inbound(topic, signed, retained=False))
    assert supervisor._course.fleet.keys() == {"cam1"}
    newer = device.seal(topic, said)
    await supervisor._on_health(Inbound(topic, newer, retained=False))
    supervisor._course.save(supervisor._course.progress)
    restarted = Supervisor(Folder(repo), release(repo), PLAN, settings, "shop", lambda event, fields: None)
    with pytest.raises(ProtocolError, match="replayed"):
        await restarted._on_health(Inbound(topic, signed, retained=False))
    signed = newer
    with pytest.raises(ProtocolError, match="certificate: device cam1 of shop may not say this"):
        await supervisor._on_health(Inbound(topic.replace("cam1", "cam2"), device.seal(topic, said), retained=False))
    authority.revoke("cam1")
    await supervisor._signed._on_revocations(Inbound("", (authority.folder / "crl.pem").read_bytes(), retained=True))
    with pytest.raises(ProtocolError, match="revoked"):
        await supervisor._on_health(Inbound(topic, signed, retained=False))
