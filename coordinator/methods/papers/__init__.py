"""The methods of the five papers, and fedge, the default.

One file is one method; `docs/methods` specifies them by section. Begin with `fedge`.
"""
