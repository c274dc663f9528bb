"""Mistral: Llama with one sliding window for all layers (v0.1: 4096; later versions: none)."""

from headrace.engine.models.config import ConfigReader, ModelConfig, read_decoder


def read(reader: ConfigReader) -> ModelConfig:
    num_layers = reader.integer("num_hidden_layers")
    reader.only("layer_types")
    window = reader.optional_integer("sliding_window")
    return read_decoder(reader, sliding_windows=(window,) * num_layers)
