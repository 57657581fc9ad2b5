"""The last part of a mixture's graph, from its candidates' outputs to its answers: one module for each problem.

Begin with `fusion`, which adds what is the same for all: energies, gate and the candidates' shares.
"""
