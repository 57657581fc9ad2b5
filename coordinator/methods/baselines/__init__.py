"""Methods without clusters: FedAvg and its relatives, and those with personal layers.

One file is one method. Begin with `fedavg`.
"""
