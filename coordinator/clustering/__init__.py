"""The room coordinator.clustering."""
