"""The authority of a federation: who belongs to it, and what a machine needs to show that it does."""
