from coordinator.simulation.samples import samples_of, shares_of
from coordinator.simulation.settings import DemoSettings, Partition, Scenario


def test_a_demo_and_a_simulation_deal_the_same_samples_out_alike() -> None:
    given = {"samples": 300, "n_groups": 3, "partition": Partition.GROUPS, "sensitive": 0.2}
    dealt = []
    for settings in (DemoSettings(**given), Scenario(**given)):
        samples, apart = samples_of(settings, 1, 0.0)
        assert len(apart.y) == 0
        dealt.append([share.y_test.tolist() for share in shares_of(settings, samples, 4, 1)])
    assert dealt[0] == dealt[1]


def test_what_is_set_apart_no_device_gets_and_the_users_own_limit_goes_first() -> None:
    samples, apart = samples_of(Scenario(samples=200), 0, 0.1, limit=100)
    assert (len(samples.y), len(apart.y)) == (180, 20)
    assert len(samples_of(Scenario(), 0, 0.0, limit=100)[0].y) == 100


def test_another_network_takes_the_place_of_the_tasks_own() -> None:
    samples, _ = samples_of(Scenario(model="cnn", samples=100), 0, 0.0)
    assert (samples.spec.model, samples.spec.model_options) == ("cnn", {})
