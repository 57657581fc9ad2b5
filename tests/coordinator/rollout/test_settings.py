"""Stages as people write them."""

import pytest
from msgspec.structs import replace

from coordinator.rollout.settings import IntroductionSettings, parse_stages
from fedge.errors import ConfigError
from fedge.settings import resolve

GIVEN = IntroductionSettings()


def test_named_canaries_go_before_the_first_share():
    found = parse_stages(replace(GIVEN, canary=" cam1, cam2,"))
    assert (found["canaries"], found["stages"]) == (("cam1", "cam2"), (0.0, 0.1, 0.5, 1.0))


@pytest.mark.parametrize("stages", ["0.5,0.1,1", "0.1,0.5", "0,1", "a"])
def test_stages_ascend_up_to_all(stages):
    with pytest.raises(ConfigError, match="stages"):
        parse_stages(replace(GIVEN, stages=stages))


def test_a_coordinator_reads_them_from_a_section_of_its_own(tmp_path):
    config = tmp_path / "fleet.toml"
    config.write_text("[introduction]\nmax_worse = 0.8\nsoak_s = 5.0\n")
    found = resolve(IntroductionSettings, "introduction", config, {})
    assert (found.max_worse, found.soak_s, found.stages) == (0.8, 5.0, GIVEN.stages)
