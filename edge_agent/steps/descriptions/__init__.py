"""The room edge_agent.steps.descriptions."""
