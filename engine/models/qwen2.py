"""Qwen2 and Qwen2.5: a bias on q, k and v, none on o."""

from headrace.engine.models.config import (
    ConfigReader,
    ModelConfig,
    read_decoder,
    read_sliding_windows,
)


def read(reader: ConfigReader) -> ModelConfig:
    reader.only("attention_bias", True, False)
    windows = read_sliding_windows(reader, reader.integer("num_hidden_layers"))
    return read_decoder(reader, sliding_windows=windows, qkv_bias=True)
