"""Llama 2 and 3.x, SmolLM2 and everything else that calls itself llama."""

from headrace.engine.models.config import ConfigReader, ModelConfig, read_decoder


def read(reader: ConfigReader) -> ModelConfig:
    """`attention_bias` puts a bias on q, k, v and o; `mlp_bias` on gate, up and down."""
    bias = reader.boolean("attention_bias", False)
    return read_decoder(
        reader,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )
