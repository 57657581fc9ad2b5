"""What the texts say; that they do what they should is shown by tests/integration/test_tls.py."""

from __future__ import annotations

from pathlib import Path

from fedge.membership.broker_configuration import (
    format_access_list,
    format_global_settings,
    format_member_listener,
    format_open_listener,
)


def test_a_listener_for_members_has_each_file_of_the_identity_and_no_old_tls() -> None:
    lines = format_member_listener(Path("/i"), Path("/r"), 8883).splitlines()
    assert lines[0] == "listener 8883"
    files = {"cafile /i/ca.crt", "crlfile /i/crl.pem", "certfile /i/own.crt", "keyfile /i/own.key", "acl_file /r/acl"}
    asked = {"require_certificate true", "use_identity_as_username true", "allow_anonymous false"}
    assert files | asked | {"tls_version tlsv1.2"} <= set(lines)
    assert format_member_listener(Path("/i"), Path("/r"), 1, "127.0.0.1").startswith("listener 1 127.0.0.1\n")


def test_limits_are_those_of_both_kinds() -> None:
    for text in (format_global_settings(), format_open_listener("127.0.0.1", 1884)):
        assert "max_packet_size 2097152\n" in text
        assert "\nmemory_limit 1073741824\n" in text
        assert "\npersistent_client_expiration 7d\n" in text


def test_rules_are_of_one_federation_alone() -> None:
    rules = [line for line in format_access_list("shop").splitlines() if "fedge/1/" in line]
    assert len(rules) == 35
    assert all("fedge/1/shop/" in rule for rule in rules)


def test_rules_are_below_the_topic_prefix() -> None:
    rules = format_access_list("shop", "company/ai").splitlines()
    plain = format_access_list("shop").splitlines()
    assert [rule.replace(" company/ai/fedge/1/shop/", " fedge/1/shop/") for rule in rules] == plain
    assert sum(" company/ai/fedge/1/shop/" in rule for rule in rules) == 35
