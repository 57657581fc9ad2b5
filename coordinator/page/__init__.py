"""The room coordinator.page."""
