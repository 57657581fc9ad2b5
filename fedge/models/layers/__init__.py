"""Layers that networks are made of: routed branches, and what methods put in the place of a network's head.

A head of a method is a module made of the network's own head, which takes features (n, D) and gives logits (n, C). What
stays on a device is in its `own`. Begin with `policy`.
"""
