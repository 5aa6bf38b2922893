"""One step of a draft head with a low-rank Markov term: scores and choice in one pass."""
