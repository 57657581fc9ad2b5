"""The device halves of the steps; `fedge.steps` has the contract of each under the same name."""
