"""Triton kernels, one a file: formula, reference, launcher, kernel. Nothing of ours is imported."""
