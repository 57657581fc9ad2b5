"""The authority of a federation: its members, and the credentials of its machines."""
