"""Settings of a coordinator."""

from __future__ import annotations

from pathlib import Path

from fedge.tensors.layout import Codec
from tests.coordinator.service.test_service import settings


def test_settings_reach_the_method_and_the_transport(tmp_path: Path) -> None:
    wanted = settings(
        None, tmp_path, local_steps=7, learning_rate=0.5, codec=Codec.FLOAT32, min_reports=2, username="u"
    )
    method = wanted.make_method_settings()
    assert (method.rounds, method.seed, method.min_reports, method.codec) == (2, 3, 2, Codec.FLOAT32)
    assert (method.sgd.steps, method.sgd.learning_rate) == (7, 0.5)
    broker = wanted.make_broker_settings(wanted.broker)
    assert (broker.host, broker.port, broker.username) == ("localhost", 1883, "u")
