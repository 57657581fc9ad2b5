"""What a device keeps for privacy: spent differential privacy, and the secrets of masked sums.

`dp_ledger` charges training with noise, `masking` keeps a sum's keys. Steps use them. Begin with `dp_ledger`.
"""
