"""The room deploy.inference."""
