"""The model to be quantized, as floats, whatever it was stored as. Knows no text and no recipe."""

import torch
from torch import Tensor

from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import Checkpoint, TensorSource, check_tensors
from headrace.engine.loading.source import open_checkpoint, resolve_model
from headrace.engine.models.config import ModelConfig
from headrace.engine.models.decoder import head_spec, layer_specs
from headrace.engine.quant.choose import FLOAT, choose_scheme
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quantize.block import norm_names

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class Source:
    """A model's floats, whatever they were stored as; `dtype`: the 16-bit type that the new
    checkpoint keeps for what is not quantized."""

    def __init__(self, name: str) -> None:
        self.path = resolve_model(name)
        self.checkpoint: Checkpoint = open_checkpoint(self.path)
        self.config: ModelConfig = self.checkpoint.config
        held = (self.checkpoint.quantization or {}).get("quant_method", "none")
        if held not in ("none", "gguf"):
            raise EngineError(
                f"{self.checkpoint.name} is quantized already ({held}); quantizing it again adds"
                " its errors to the new ones: give the original model"
            )
        self.layers = layer_specs(self.config)
        self.linears: list[LinearSpec] = [spec for layer in self.layers for spec in layer]
        head = head_spec(self.config)
        scheme = choose_scheme(self.checkpoint, FLOAT, self.linears, head)
        self.tensors: TensorSource = scheme.source
        self.dtype = torch.bfloat16 if self.config.dtype == "bfloat16" else torch.float16
        self._check(head)

    def stored(self, name: str) -> Tensor:
        """A tensor that stays a float, as the new checkpoint holds it."""
        return self.narrowed(name, self.tensors.load(name))

    def narrowed(self, name: str, tensor: Tensor) -> Tensor:
        short = tensor.to(self.dtype)
        if not bool(short.isfinite().all()):
            raise EngineError(f"{name} does not fit into {self.dtype}: {tensor.abs().max():.3g}")
        return short

    def global_names(self) -> list[str]:
        return [EMBEDDING, FINAL_NORM, *(() if self.config.tie_word_embeddings else (HEAD,))]

    def head(self) -> Tensor:
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        count = self.checkpoint.num_token_ids or self.config.vocab_size
        return self.tensors.load(name)[:count]

    def _check(self, head: LinearSpec) -> None:
        """Missing and misshapen tensors are named before hours are spent."""
        config = self.config
        expected = {
            EMBEDDING: (config.vocab_size, config.hidden_size),
            FINAL_NORM: (config.hidden_size,),
        }
        if not config.tie_word_embeddings:
            expected[f"{head.parts[0]}.weight"] = (config.vocab_size, config.hidden_size)
        ignored = {HEAD}
        for index, layer in enumerate(self.layers):
            ignored.add(f"model.layers.{index}.self_attn.rotary_emb.inv_freq")
            for name in norm_names(config, index):
                inside = name.endswith(("q_norm.weight", "k_norm.weight"))
                expected[name] = (config.head_dim if inside else config.hidden_size,)
            for spec in layer:
                for part, rows in zip(spec.parts, spec.out_features, strict=True):
                    expected[f"{part}.weight"] = (rows, spec.in_features)
                    if spec.bias:
                        expected[f"{part}.bias"] = (rows,)
        check_tensors(self.tensors.shapes(), expected, ignored)
