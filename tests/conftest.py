"""Shared fixtures. Helpers that tests import live in tests/support.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set here, before any test imports
one: without a GPU the kernels run in Triton's interpreter.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
