"""The steps of devices, one contract per module (`fedge.step`); the device halves are in `edge_agent.steps`."""
