"""The commands of simulations: `fedge simulate`, `compare`, `tune`, `check`, `sample`, `report`.

They read settings and call `coordinator.simulation`. Begin with `simulate`.
"""
