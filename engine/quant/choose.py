"""Which scheme a checkpoint gets: as it is stored, or as the operator asked for."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import Checkpoint, TensorSource
from headrace.engine.quant import stored as stored_formats
from headrace.engine.quant.bitsandbytes import LoadedCodes
from headrace.engine.quant.device_matrix import on_kernels
from headrace.engine.quant.int8 import Int8
from headrace.engine.quant.int8_dynamic import Int8Dynamic
from headrace.engine.quant.integer import GROUPS, Integer
from headrace.engine.quant.llm_int8 import LLMInt8
from headrace.engine.quant.method import AnyMethod, LinearSpec
from headrace.engine.quant.scheme import FloatSource, Scheme
from headrace.engine.quant.unquantized import Unquantized

logger = logging.getLogger(__name__)

FLOAT = "float"
"""Asks for weights in the model's float type, whatever the checkpoint stores."""

HEAD_SUFFIX = "+head"
"""Behind a scheme's name: the head is quantized too (embeddings and norms never are)."""

_CODES = re.compile(r"(nf4|fp4)(-double)?")
_GROUPED = re.compile(r"int([34])(?:-g(\d+))?(-sym|-asym)?")


def choose_scheme(
    checkpoint: Checkpoint,
    asked: str | None,
    layers: Sequence[LinearSpec],
    head: LinearSpec,
    device: torch.device | None = None,
) -> Scheme:
    """The scheme for a checkpoint whose linear layers are `layers` and `head`, to run on `device`
    (None: a CPU). GGUF's blocks are floats where the Triton kernels multiply, unless asked for.

    CheckpointError: what is stored cannot be read; EngineError: `asked` is unknown or is not what
    the checkpoint holds.
    """
    stored = stored_formats.stored_scheme(checkpoint, layers, head)
    if asked is None:
        if stored.name == "gguf" and device is not None and on_kernels(device):
            logger.warning(
                "%s: GGUF blocks have no kernel on this device; they run as floats, 16 bits each"
                " (quantization int8 or int4-g32 keeps them small)",
                checkpoint.name,
            )
            return Scheme("none", checkpoint.tensors)
        if stored.name == "gguf" and float_bytes(checkpoint) <= PACKED_ABOVE:
            return Scheme("none", checkpoint.tensors)
        return stored
    name, with_head = asked.strip().lower(), False
    if name.endswith(HEAD_SUFFIX):
        name, with_head = name.removesuffix(HEAD_SUFFIX), True
    if name == stored.name and not with_head:
        return stored
    if name in stored_formats.NAMES:
        held = "plain floats" if stored.name == "none" else stored.name
        raise EngineError(
            f"quantization {name!r} is not what {checkpoint.name} holds ({held}); leave the option"
            f" out, or choose what is made at load: {', '.join(LOAD_TIME)}"
        )
    method = Unquantized() if name in (FLOAT, "none") else load_time_method(name)
    source: TensorSource = checkpoint.tensors  # GGUF gives floats by itself
    if stored.name not in ("none", "gguf"):
        source = FloatSource(stored, [*layers, head])
    scheme = Scheme("none" if name == FLOAT else name, source, lambda spec: method)
    if with_head:
        return replace(scheme, name=name + HEAD_SUFFIX, head=method)
    return scheme


PACKED_ABOVE = 1 << 30
"""Bytes of float32 weights up to which a GGUF file is run as floats when nothing is asked for;
`gguf` keeps its blocks. SmolLM2-135M in Q4_1 on AVX-512, tokens per second of one thread: float32
11 alone, 124 in a batch of 16, 179 of 32, 450 in prefill; blocks 22, 55, 121, 350, in 0.15 of the
memory. A queue fills batches."""


def float_bytes(checkpoint: Checkpoint) -> int:
    """What the checkpoint's tensors take in float32."""
    return 4 * sum(math.prod(shape) for shape in checkpoint.tensors.shapes().values())


LOAD_TIME = (
    *("int8", "int8-dynamic", "int4-g64", "int4-g64-sym", "int3-g64"),
    *("nf4", "nf4-double", "fp4", "bnb-int8", FLOAT),
)
"""Names to show: groups may be 32, 64 or 128."""


def load_time_method(name: str) -> AnyMethod:
    """What quantizes float weights at load under this name."""
    if name == "int8":
        return Int8()
    if name == "int8-dynamic":
        return Int8Dynamic()
    if name in ("bnb-int8", "llm.int8"):
        return LLMInt8()
    codes = _CODES.fullmatch(name)
    if codes:
        return LoadedCodes(codes[1], double=codes[2] is not None)
    grouped = _GROUPED.fullmatch(name)
    if grouped:
        group = int(grouped[2] or 128)
        if group not in GROUPS:
            raise EngineError(f"quantization {name!r}: groups of {group} are not run (32, 64, 128)")
        return Integer(int(grouped[1]), group, symmetric=grouped[3] == "-sym")
    raise EngineError(
        f"quantization {name!r} is not supported; at load: {', '.join(LOAD_TIME)}"
        f" (each also with {HEAD_SUFFIX}); in a checkpoint: {', '.join(stored_formats.NAMES)}"
    )
