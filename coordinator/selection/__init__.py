"""Who trains in a round: `ccmab`, a contextual bandit under a deadline."""
