"""What devices learn and measure, shared by several steps.

`frame` is one participation in a round of training: start, train, keep, send. `candidates`, `private_model`, `mixture`
and `gate` make a device's mixture; `profile` and `evaluation` measure; `batched` runs many simulated devices at once.
Steps use them. Begin with `frame`.
"""
