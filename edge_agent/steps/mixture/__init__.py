"""The room edge_agent.steps.mixture."""
