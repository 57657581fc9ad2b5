"""Which devices belong together: by what their data light up (`aidc`), by where their updates point (`mctc`)."""
