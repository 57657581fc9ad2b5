"""Steps that describe a device's data, or score models on it.

They give profiles, label features, mean features, routes and trials. One file is one contract; the device half has the
same name below `edge_agent.steps.descriptions`. Begin with `profile`.
"""
