"""The room edge_agent.device."""
