"""Making quantized checkpoints: GPTQ, AWQ and rounding to nearest, layer by layer."""
