"""New bundles: how they come, are trusted, tried, and replace the old one.

`link` hears of them, `trust` checks signatures, `slots` keeps them, `examination` and `quality` try them, `answering`
changes over. Begin with `slots`.
"""
