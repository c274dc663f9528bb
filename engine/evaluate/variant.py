"""One way to run a model: its weights, how they are held, and the types beside them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from headrace.engine.config import FLOAT_TYPES, DType, EngineConfig
from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.quant import stored
from headrace.engine.quant.choose import FLOAT, HEAD_SUFFIX, load_time_method


def _check_known(name: str) -> None:
    """EngineError for a name that no checkpoint and no method has: before minutes are spent."""
    plain = name.removesuffix(HEAD_SUFFIX)
    if plain not in (*FLOAT_TYPES, FLOAT, "none", *stored.NAMES):
        load_time_method(plain)


@dataclass(frozen=True, slots=True)
class Variant:
    """`quantization` None: as the checkpoint stores its weights."""

    model: str
    quantization: str | None = None
    dtype: DType = "auto"
    kv_cache_dtype: str = "auto"

    @classmethod
    def read(
        cls, model: str, quantization: str | None, dtype: str = "auto", kv: str = "auto"
    ) -> "Variant":
        """`quantization` may also be a float type: bf16, float32, ..."""
        if dtype not in get_args(DType):
            raise EvaluateError(f"dtype {dtype!r} is not one of {', '.join(get_args(DType))}")
        chosen: DType = dtype  # type: ignore[assignment]
        name = None if quantization is None else quantization.strip().lower()
        if name:
            _check_known(name)
        if name in FLOAT_TYPES:
            if chosen not in ("auto", FLOAT_TYPES[name]):
                raise EvaluateError(f"quantization {name!r} contradicts dtype {dtype}")
            return cls(model, FLOAT, FLOAT_TYPES[name], kv)
        return cls(model, name or None, chosen, kv)

    @property
    def label(self) -> str:
        """As reports call it, e.g. `smollm2 int4-g64, kv int8`."""
        name = Path(self.model).name.removesuffix(".gguf")
        parts = [name if self.quantization is None else f"{name} {self.quantization}"]
        if self.dtype != "auto":
            parts.append(self.dtype)
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv {self.kv_cache_dtype}")
        return ", ".join(parts)

    def config(self, machine: EngineConfig) -> EngineConfig:
        """`machine`: the settings that all variants share."""
        return replace(
            machine,
            model=self.model,
            quantization=self.quantization,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )
