"""The room edge_agent.agent."""
