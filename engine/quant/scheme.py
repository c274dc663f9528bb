"""How the weights of a whole model are held: which method each linear layer gets, and where its
tensors come from. Chosen by what the checkpoint stores and by what the operator asked for.

Knows no architecture: it is handed the model's linear layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import Checkpoint, TensorSource
from headrace.engine.quant.int8 import Int8
from headrace.engine.quant.int8_dynamic import Int8Dynamic
from headrace.engine.quant.method import LinearSpec, QuantMethod
from headrace.engine.quant.unquantized import Unquantized

FLOAT = "float"
"""Asks for weights in the model's float type, whatever the checkpoint stores."""

HEAD_SUFFIX = "+head"
"""Behind a scheme's name: the head is quantized too (embeddings and norms never are)."""

MethodFor = Callable[[LinearSpec], QuantMethod[Any]]


def _plain(spec: LinearSpec) -> QuantMethod[Any]:
    return Unquantized()


@dataclass(frozen=True, slots=True)
class Scheme:
    """`source`: the tensors as the methods read them; `head`: the method for a head that is stored
    as floats. `ignored`: names of tensors that no layer needs."""

    name: str
    source: TensorSource
    method_for: MethodFor = _plain
    head: QuantMethod[Any] = field(default_factory=Unquantized)
    ignored: Iterable[str] = ()


def choose_scheme(
    checkpoint: Checkpoint, asked: str | None, layers: Sequence[LinearSpec]
) -> Scheme:
    """The scheme for a checkpoint: as stored, or quantized at load when a scheme is `asked` for.

    CheckpointError: what is stored cannot be read; EngineError: an unknown name.
    """
    stored = Scheme("none", checkpoint.tensors)
    if asked is None:
        return stored
    name, with_head = asked.strip().lower(), False
    if name.endswith(HEAD_SUFFIX):
        name, with_head = name.removesuffix(HEAD_SUFFIX), True
    if name in (FLOAT, "none"):
        return stored
    make = load_time_method(name)
    method = make()
    return Scheme(
        name + HEAD_SUFFIX if with_head else name,
        stored.source,
        lambda spec: method,
        method if with_head else Unquantized(),
    )


_METHODS: Mapping[str, Callable[[], QuantMethod[Any]]] = {
    "int8": Int8,
    "int8-dynamic": Int8Dynamic,
}


def load_time_method(name: str) -> Callable[[], QuantMethod[Any]]:
    """What quantizes float weights at load under this name."""
    found = _METHODS.get(name)
    if found is None:
        raise EngineError(
            f"quantization {name!r} is not supported; at load: {', '.join(_METHODS)}"
            f" (each also with {HEAD_SUFFIX}), {FLOAT} for none"
        )
    return found
