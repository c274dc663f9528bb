"""Checkpoints: from files to named float tensors and a strict model configuration."""
