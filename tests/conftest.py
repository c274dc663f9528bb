"""Shared fixtures. Helpers that tests import live in tests/support."""
