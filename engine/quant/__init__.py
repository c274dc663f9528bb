"""Running quantized weights: one scheme a file."""
