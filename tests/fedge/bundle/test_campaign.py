"""The mark of a bundle that waits for its campaign's introduction."""

import pytest

from fedge.bundle.campaign import FILE, make_campaign_files, read_campaign


def test_a_bundle_that_enters_service_at_once_has_no_mark():
    assert make_campaign_files(0) == {}


def test_a_mark_is_read_as_written(tmp_path):
    for name, data in make_campaign_files(3).items():
        (tmp_path / name).write_bytes(data)
    assert read_campaign(tmp_path) == 3


@pytest.mark.parametrize("data", [None, b"", b"[]", b'{"campaign": -1}'])
def test_what_is_no_mark_holds_nothing_back(tmp_path, data):
    if data is not None:
        (tmp_path / FILE).write_bytes(data)
    assert read_campaign(tmp_path) == 0
