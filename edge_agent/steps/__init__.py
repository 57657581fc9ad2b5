"""What a device does for each step: the device half of the contract of the same name in `fedge.steps`."""
