"""All that a device can be asked: one contract a module (`fedge.step`), its device half under `edge_agent.steps`."""
