"""The commands of a device that predicts: `fedge infer`, `fedge serve` and `fedge install`.

Begin with `infer`.
"""
