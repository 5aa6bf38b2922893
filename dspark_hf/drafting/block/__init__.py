"""Block drafters: a backbone over the target's features, a sequential head, a confidence head."""
