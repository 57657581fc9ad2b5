"""The commands of a device that predicts: `fedge infer`, `serve` and `install`.

Begin with `infer`.
"""
