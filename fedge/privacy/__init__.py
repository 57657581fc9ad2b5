"""Rules on what may leave a device, the record of what left, and sums that hide their parts.

`egress` is the door that every message passes, `ledger` its record; `masked_sums` and `shares` are the part of secure
aggregation that both sides use. Agents and the runtime use this package. Begin with `egress`.
"""
