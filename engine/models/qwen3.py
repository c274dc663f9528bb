"""Qwen3: RMSNorm on each head of q and k before rope; head_dim is its own (default 128)."""

from headrace.engine.models.config import (
    ConfigReader,
    ModelConfig,
    read_decoder,
    read_sliding_windows,
)


def read(reader: ConfigReader) -> ModelConfig:
    bias = reader.boolean("attention_bias", False)
    windows = read_sliding_windows(reader, reader.integer("num_hidden_layers"))
    return read_decoder(
        reader,
        sliding_windows=windows,
        default_head_dim=128,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
