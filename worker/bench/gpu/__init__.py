"""`make bench-gpu`: what a GPU does with the kernels and the engine, in at most eight minutes.

Random weights in real models' shapes, no downloads. Every item is a process of its own that writes
its figures as it has them, so that a run that is cut keeps what it measured.
"""
