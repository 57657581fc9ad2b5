"""What a server computes itself, on its own labelled samples or for devices that do not train.

`learning` and `extractor` train, `assembling` makes bundles in a child process. Methods use it. Begin with
`assembling`.
"""
