"""Which devices belong together: by what their data light up (`aidc`), by where their updates point (`mctc`).

Plainer rivals: `kmeans`, `agglomerative`, `labels`. Clusters are tuples of positions by ascending device id.
"""
