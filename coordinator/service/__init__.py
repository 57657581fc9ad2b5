"""The room coordinator.service."""
