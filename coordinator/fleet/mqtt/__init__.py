"""The room coordinator.fleet.mqtt."""
