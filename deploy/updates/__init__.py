"""New bundles: how they arrive, are verified and tried, and replace the old bundle.

`link` receives announcements, `decision` chooses the next step, `trust` checks signatures, `slots` stores bundles,
`examination` and `quality` try them, and `answering` switches to a new one. Begin with `slots`.
"""
