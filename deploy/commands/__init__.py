"""The room deploy.commands."""
