"""Scaling on queue depth: the controllers' rules and a simulation of them. No torch, no engine."""
