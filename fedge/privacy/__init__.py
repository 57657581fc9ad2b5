"""What may leave a device, the record of what left, and sums that hide their parts.

`egress` is the door that every message passes, `ledger` its record; `masked_sums` and `shares` are the shared part of
secure aggregation. Agents and the runtime use it. Begin with `egress`.
"""
