"""The room deploy.updates."""
