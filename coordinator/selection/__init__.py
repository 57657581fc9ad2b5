"""The room coordinator.selection."""
