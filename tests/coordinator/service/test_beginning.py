"""What a federation begins with, and what it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.methods.state import encode_state
from coordinator.service import beginning
from coordinator.service.beginning import (
    RunLength,
    begin_campaign,
    make_settings_method,
    plan_growth,
    prolong,
    read_campaigns,
    read_length,
    resume,
    start,
)
from coordinator.service.campaigns import begin_next
from coordinator.store.classes import read_classes, settle_task
from coordinator.store.store import Store
from fedge.data.classes import MAX_ADDED, add_classes
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, StoreError
from fedge.system.hardware import Processor
from fedge.tasks import load_task
from fedge.tensors import codecs
from fedge.tensors.layout import Layout, Model, TensorInfo, unflatten
from fedge.wire.messages import BlobRef
from tests.coordinator.service.test_service import settings
from tests.support.device import TASK
from tests.support.learners import LAYOUT

pytestmark = pytest.mark.usefixtures("no_torch")


def test_more_rounds_only_where_the_method_has_them_and_between_two_ends(tmp_path: Path, store: Store) -> None:
    start(settings(None, tmp_path), TASK, store)

    def longer(round_: int, *, method: str = "fedavg", **changes: Any) -> RunLength:
        wanted = settings(None, tmp_path, rounds=5, method=method, **changes)
        before, length = read_length(wanted, store)
        made = make_settings_method(before, TASK, last=length.last)
        state = msgspec.structs.replace(made.init(LAYOUT, BlobRef(digest="0" * 64, size_bytes=1)), round=round_)
        return prolong(wanted, length, made, state, store)

    assert [longer(n) for n in (1, 2, 3, 7)] == [RunLength(total=5, last=n) for n in (5, 5, 6, 10)]
    with pytest.raises(ConfigError, match="--dp-epsilon is what all rounds may spend together"):
        longer(1, dp_epsilon=1.0)
    with pytest.raises(ConfigError, match="local has no rounds"):
        longer(1, method="local")
    store.start_round(3, [], now=1.0)
    with pytest.raises(ConfigError, match="let that end with --rounds 2, then go on"):
        longer(2)


@pytest.mark.parametrize("change", [{"seed": 4}, {"method": "fedge"}, {"rounds": 9}])
def test_a_folder_of_another_federation_is_refused(tmp_path: Path, store: Store, change: dict[str, Any]) -> None:
    start(settings(None, tmp_path), TASK, store)
    with pytest.raises(ConfigError, match="another federation"):
        start(settings(None, tmp_path, **change), TASK, store)


def test_another_task_is_another_federation_and_what_differs_is_said(tmp_path: Path, store: Store) -> None:
    start(settings(None, tmp_path), TASK, store)
    more = msgspec.structs.replace(TASK, classes=(*TASK.classes, "fox"))
    with pytest.raises(
        ConfigError, match=r"another federation \(the task is one with class fox\): use another --home.*-add"
    ):
        start(settings(None, tmp_path), more, store)
    (tmp_path / "task.json").unlink()
    with pytest.raises(ConfigError, match="the task is another one"):
        start(settings(None, tmp_path), more, store)


def test_the_first_model_is_made_once(tmp_path: Path, store: Store, no_torch: list[int]) -> None:
    layout, ref = start(settings(None, tmp_path), TASK, store)
    assert load_task(str(tmp_path / "task.json")) == TASK, "for the devices"
    assert layout == LAYOUT
    assert isinstance(ref, BlobRef)
    first = codecs.decode(store.blobs.get(ref.digest), ref.codec, layout)
    np.testing.assert_array_equal(unflatten(first, layout)["w"], np.full(3, 3, np.float32))
    assert start(settings(None, tmp_path), TASK, store) == (layout, ref)
    assert no_torch == [3]


def test_options_reach_the_method_and_make_another_federation(tmp_path: Path, store: Store) -> None:
    values = settings(None, tmp_path, method="fedprox")
    assert make_settings_method(values, TASK, {"proximal_mu": 0.3}).settings.options == {"proximal_mu": 0.3}
    kept = start(values, TASK, store, {"proximal_mu": 0.3})
    assert start(values, TASK, store, {"proximal_mu": 0.3}) == kept
    with pytest.raises(ConfigError, match="another federation"):
        start(values, TASK, store, {"proximal_mu": 0.1})


def test_the_reserved_set_reaches_the_method(tmp_path: Path) -> None:
    task = load_task("digits")
    values = settings(None, tmp_path, method="fedcoe")
    with pytest.raises(ConfigError, match="--server-data"):
        make_settings_method(values, task)
    np.savez(tmp_path / "r.npz", x=np.full((30, 8, 8), 16.0), y=np.arange(30) % 10)
    method = make_settings_method(msgspec.structs.replace(values, server_data=tmp_path / "r.npz"), task)
    assert sorted(method.server_data.y.tolist()) == sorted((np.arange(30) % 10).tolist())
    np.testing.assert_allclose(method.server_data.x, (1 - 0.3053) / 0.3761, rtol=1e-5)


def test_a_gpu_is_asked_for_only_where_the_server_trains_and_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="trains no network on the server"):
        make_settings_method(settings(None, tmp_path, method="fedavg", train_on=Processor.CUDA), load_task("digits"))
    np.savez(tmp_path / "r.npz", x=np.zeros((20, 8, 8)), y=np.arange(20) % 10)
    values = settings(None, tmp_path, method="fedcoe", train_on=Processor.CUDA, server_data=tmp_path / "r.npz")
    with pytest.raises(ConfigError, match="finds no GPU here"):
        make_settings_method(values, load_task("digits"))


@pytest.mark.parametrize("what", ["state", "start", "length", "identity"])
def test_a_store_that_holds_garbage_is_an_error_that_says_what_to_do(tmp_path: Path, store: Store, what: str) -> None:
    """As a backup may, or a disk."""
    wanted = settings(None, tmp_path / "server")
    resume(wanted, TASK, store, {})
    if what == "state":
        store._change(lambda db: db.execute("INSERT INTO states (round, body) VALUES ($1, $2)", 1, b"garbage"))
    else:
        store.put_value(what, "garbage")
    with pytest.raises(
        StoreError, match=r"server holds of the run cannot be read; restore another backup, or begin anew"
    ):
        resume(wanted, TASK, store, {})


def first_model_with_head(task: TaskSpec, seed: int, *_: object) -> tuple[Layout, Model]:
    """Of a network whose head has an output for each class."""
    head = TensorInfo(name="head.weight", shape=(task.n_classes, 2), layer="head")
    layout = Layout(tensors=(head, TensorInfo(name="head.bias", shape=(task.n_classes,), layer="head")))
    return layout, Model(np.full(layout.n_params, seed, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


def test_a_class_joins_for_good_whenever_the_coordinator_is_killed(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "make_first_model", first_model_with_head)
    wanted = settings(None, tmp_path, rounds=1)
    method, _, _, state = resume(wanted, TASK, store, {})
    state = msgspec.structs.replace(state, round=2)
    store.commit_round(2, encode_state(state), 0.0, {}, keep=1)

    growth = plan_growth(wanted, method, TASK, ["fox"], store)
    assert read_classes(store).names == (), "nothing is begun yet"
    campaigns = begin_next(read_campaigns(store), "", [], first=2, planned=1, now=0.0, added=("fox",))
    _, begun = begin_campaign(method, state, store, campaigns, growth)

    grown = add_classes(TASK, ("fox",))
    assert [settle_task(store, task) for task in (TASK, grown)] == [grown, grown]
    for task in (TASK, grown):
        _, layout, _, again = resume(wanted, task, store, {})
        assert again == begun
    assert layout == again.layout == first_model_with_head(grown, 0)[0]
    model = codecs.decode(store.blobs.get(again.model.digest), again.model.codec, layout)
    np.testing.assert_array_equal(model.params, np.full(9, 3, np.float32))
    assert load_task(str(tmp_path / "task.json")) == grown
    with pytest.raises(ConfigError, match="the task is one without class b, fox"):
        start(wanted, msgspec.structs.replace(TASK, classes=("a", "c")), store)


def test_a_network_that_does_not_grow_with_its_task_gets_no_class(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "make_first_model", first_model_with_head)
    wanted = settings(None, tmp_path)
    method, *_ = resume(wanted, TASK, store, {})
    for names, why in (("a", "a class already"), ("c" * (MAX_ADDED + 1), f"at most {MAX_ADDED}")):
        with pytest.raises(ConfigError, match=why):
            plan_growth(wanted, method, TASK, [*names], store)
    monkeypatch.setattr(beginning, "make_first_model", lambda *_: first_model_with_head(TASK, 0))
    with pytest.raises(ConfigError, match=r"from task\.n_classes"):
        plan_growth(wanted, method, TASK, ["c"], store)


@pytest.mark.parametrize(("method", "why"), [("fedavg", "has no head"), ("cfic", "cfic cannot take further classes")])
def test_who_takes_no_further_class_says_why(tmp_path: Path, store: Store, method: str, why: str) -> None:
    wanted = settings(None, tmp_path, method=method)
    made, *_ = resume(wanted, TASK, store, {})
    with pytest.raises(ConfigError, match=why):
        plan_growth(wanted, made, TASK, ["c"], store)
