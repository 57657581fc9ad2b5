"""The room edge_agent.steps.training."""
