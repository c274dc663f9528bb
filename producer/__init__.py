"""The public names of the producer's side. Nothing here imports torch or anything of the worker."""
