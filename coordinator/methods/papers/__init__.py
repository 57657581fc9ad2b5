"""The room coordinator.methods.papers."""
