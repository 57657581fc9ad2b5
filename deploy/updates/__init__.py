"""New bundles: how they come, are trusted, tried, and replace the old one.

`link` hears of them, `decision` says what is next, `trust` checks signatures, `slots` keeps them, `examination` and
`quality` try them, `answering` changes over. Begin with `slots`.
"""
