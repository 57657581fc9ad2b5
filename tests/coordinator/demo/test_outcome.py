from coordinator.demo.outcome import METHODS, DeviceOutcome, mean_accuracy


def test_each_device_counts_the_same() -> None:
    devices = [
        DeviceOutcome(
            id=str(n),
            n_train=n,
            n_test=n,
            experts=(),
            accuracy=dict.fromkeys(METHODS, value),
            bundle="",
            max_abs_diff_torch_onnx=0.0,
        )
        for n, value in ((10, 1.0), (1000, 0.5))
    ]
    assert mean_accuracy(devices) == dict.fromkeys(METHODS, 0.75)
