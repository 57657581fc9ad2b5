"""The steps of devices, one contract per module (`fedge.steps.contract`); the device halves are in `edge_agent.steps`."""
