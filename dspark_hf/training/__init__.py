"""Training of block drafters: data, features, losses, checkpoints, calibration."""
