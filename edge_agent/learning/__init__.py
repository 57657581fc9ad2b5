"""What devices learn and measure, shared by several steps.

`candidates`, `private_model`, `mixture` and `gate` make a device's mixture; `profile` and `evaluation` measure;
`batched` runs many simulated devices at once. Steps use it. Begin with `mixture`.
"""
