"""The room edge_agent.steps.masked."""
