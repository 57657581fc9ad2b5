"""The room coordinator.methods.server."""
