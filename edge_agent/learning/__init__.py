"""The room edge_agent.learning."""
