"""The units of systemd and the configurations that they name."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.federation import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(("role", "file"), [("agent", "raspberry_pi.toml"), ("coordinator", "edge_server.toml")])
def test_a_service_with_a_user_of_its_own_is_handed_its_key(role: str, file: str) -> None:
    unit = (EXAMPLES / "systemd" / f"fedge-{role}.service").read_text()
    (name,) = re.findall(r"^LoadCredential=([^:]+):/", unit, re.MULTILINE)
    assert "DynamicUser=yes" in unit
    settings = tomllib.loads((EXAMPLES / file).read_text())[role]
    assert settings["key_file"] == f"/run/credentials/fedge-{role}.service/{name}"
