"""The room coordinator.methods.baselines."""
