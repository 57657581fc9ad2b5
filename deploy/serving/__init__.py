"""The room deploy.serving."""
