"""The room coordinator.methods.parts."""
