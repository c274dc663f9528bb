"""Architectures, one a file, named by model_type."""
