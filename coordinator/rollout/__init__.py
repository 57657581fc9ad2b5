"""The room coordinator.rollout."""
