"""What networks learn by: the loss of each problem in torch, -l of `fedge.data.problems` at T = 1 without offset.

Begin with `losses`. Each other module is one kind of problem: a function of outputs, inputs and targets that returns
the losses of n samples, (n,). Targets of padding samples are zeros here.
"""
