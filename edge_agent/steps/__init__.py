"""Device halves of steps: `run(device, action) -> result`.

The rooms are those of `fedge.steps`, where the contracts are; the listing of both shows everything that a device can be
asked to do. Begin with `training.train`.
"""
