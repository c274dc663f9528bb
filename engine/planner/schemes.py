"""Weight schemes by name: how many bytes one matrix takes, scales and zero points counted.

Embeddings, head and norms are not a scheme's business: they stay at 16 (or 32) bits, which
`weights` adds. GGUF types are the exception, since a GGUF file quantizes all of its matrices.
"""

import re
from dataclasses import dataclass
from typing import Literal

from headrace.engine.planner.errors import PlanError
from headrace.engine.planner.gguf_types import MIXTURES

Kind = Literal["float", "channel", "group", "gptq", "awq", "bnb4", "fp8", "gguf"]
Compute = Literal["float", "int8", "fp8"]
"""What the matmul runs in: `float` dequantizes the weights and multiplies in the float type."""

_NF4_BLOCK = 64
_NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a matrix. `group` 0: one scale a row. `zeros`: zero points are stored."""

    name: str
    kind: Kind
    bits: int
    group: int = 0
    zeros: bool = False
    compute: Compute = "float"
    double_quant: bool = False
    mixture: str = ""

    @property
    def weight_only(self) -> bool:
        """Weights are dequantized on the fly, so a large batch gains nothing and pays for it."""
        return self.kind != "float" and self.compute == "float"

    def matrix_bytes(self, rows: int, columns: int, dtype_bytes: int) -> int:
        """Bytes of one [rows, columns] matrix (out, in); `dtype_bytes` is the float type's."""
        if self.kind == "float":
            return rows * columns * (self.bits // 8)
        if self.kind == "channel":
            return rows * columns + rows * 4
        if self.kind == "fp8":
            if not self.group:
                return rows * columns + rows * 4
            return rows * columns + -(-rows // self.group) * -(-columns // self.group) * 4
        if self.kind == "bnb4":
            return self._bnb4_bytes(rows * columns)
        groups = -(-columns // self.group) if self.group else 1
        scales = rows * groups * 2
        zeros = -(-rows * groups * self.bits // 8) if self.zeros else 0
        packed = rows * _words(columns * self.bits) * 4
        order = columns * 4 if self.kind == "gptq" else 0
        return packed + scales + zeros + order

    def _bnb4_bytes(self, values: int) -> int:
        blocks = -(-values // _NF4_BLOCK)
        codebook = 16 * 4
        if not self.double_quant:
            return -(-values // 2) + blocks * 4 + codebook
        nested = -(-blocks // _NESTED_BLOCK) * 4 + 256 * 4 + 4
        return -(-values // 2) + blocks + nested + codebook


def _words(bits: int) -> int:
    return -(-bits // 32)


_FLOATS = {"fp32": 32, "fp16": 16, "bf16": 16}
_ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "w8a16": "int8",
    "w8a8": "int8-dynamic",
    "int4": "int4-g128",
    "int3": "int3-g128",
    "w4a16": "int4-g128-sym",
    "gptq": "gptq-int4-g128",
    "gptq-int4": "gptq-int4-g128",
    "gptq-int3": "gptq-int3-g128",
    "gptq-int8": "gptq-int8-g128",
    "awq": "awq-g128",
    "nf4-dq": "nf4-double",
    "llm.int8": "bnb-int8",
    "fp8-e4m3": "fp8",
}
_GROUPED = re.compile(r"int([234])-g(32|64|128)(-sym|-asym)?")
_GPTQ = re.compile(r"gptq-int([2348])-(g(\d+)|channel)")
_AWQ = re.compile(r"awq-g(\d+)")
EXAMPLES = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "int8-dynamic",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g128-sym",
    "int3-g128",
    "gptq-int4-g128",
    "gptq-int3-g128",
    "gptq-int8-g128",
    "awq-g128",
    "nf4",
    "nf4-double",
    "fp4",
    "bnb-int8",
    "fp8",
    "fp8-block",
    *(f"gguf-{m.lower()}" for m in MIXTURES),
)


def parse_scheme(text: str) -> Scheme:
    """The scheme of a name such as `int4-g64-sym`. Raises PlanError listing what is known."""
    name = text.strip().lower()
    name = _ALIASES.get(name, name)
    if name in _FLOATS:
        return Scheme(name, "float", _FLOATS[name])
    if name in ("int8", "bnb-int8"):
        return Scheme(name, "channel", 8)
    if name == "int8-dynamic":
        return Scheme(name, "channel", 8, compute="int8")
    if name in ("fp8", "fp8-block"):
        return Scheme(name, "fp8", 8, group=128 if name == "fp8-block" else 0, compute="fp8")
    if name in ("nf4", "fp4", "nf4-double", "fp4-double"):
        return Scheme(name, "bnb4", 4, group=_NF4_BLOCK, double_quant=name.endswith("-double"))
    if match := _GROUPED.fullmatch(name):
        symmetric = match[3] == "-sym"
        name = name.removesuffix("-asym")
        return Scheme(name, "group", int(match[1]), int(match[2]), zeros=not symmetric)
    if match := _GPTQ.fullmatch(name):
        return Scheme(name, "gptq", int(match[1]), int(match[3] or 0), zeros=True)
    if match := _AWQ.fullmatch(name):
        return Scheme(name, "awq", 4, int(match[1]), zeros=True)
    mixture = name.removeprefix("gguf-").upper()
    if mixture in MIXTURES:
        return Scheme(f"gguf-{mixture.lower()}", "gguf", int(mixture[1]), mixture=mixture)
    raise PlanError(f"unknown weight scheme {text!r}; known: {', '.join(EXAMPLES)}")
