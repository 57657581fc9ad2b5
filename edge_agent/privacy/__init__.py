"""The room edge_agent.privacy."""
