"""What is to be made: bits, method, groups, file format. Impossible combinations are refused here,
by name and before any weight is read."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from headrace.engine.errors import EngineError
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quantize.gptq import Order

Method = Literal["gptq", "awq", "rtn"]
Format = Literal["gptq", "awq", "compressed-tensors"]

BITS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}
GROUPS = (128, 64, 32)
_KERNEL_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """`group` 0: one for the whole row. `clip`: AWQ's search for narrower ranges."""

    bits: int
    method: Method
    format: Format
    group: int
    symmetric: bool
    order: Order
    static_groups: bool
    damping: float
    clip: bool

    @property
    def calibrated(self) -> bool:
        return self.method != "rtn"

    @property
    def label(self) -> str:
        """What a folder made so is called after: int4-gptq-g64."""
        return f"int{self.bits}-{self.method}" + (f"-g{self.group}" if self.group else "")

    def values(self) -> dict[str, Any]:
        return asdict(self)


def make_recipe(
    to: str,
    layers: list[LinearSpec],
    *,
    method: str = "gptq",
    format: str = "auto",
    group: int | None = None,
    symmetric: bool | None = None,
    order: str = "groups",
    static_groups: bool = False,
    damping: float = 0.01,
    clip: bool = True,
) -> Recipe:
    """The recipe for a model with these linear layers; what is None follows from the rest.

    The format is the method's own: GPTQ's for gptq and rtn, AWQ's for awq at 4 bits (its files know
    no other width: AWQ's scales at other widths are written as GPTQ's), INT8 weights with INT8
    activations of compressed-tensors for int8. Raises EngineError.
    """
    if to not in BITS:
        raise EngineError(f"--to {to!r} is not one of {', '.join(BITS)}")
    bits = BITS[to]
    if method not in ("gptq", "awq", "rtn"):
        raise EngineError(f"--method {method!r} is not one of gptq, awq, rtn")
    if order not in ("groups", "columns", "none"):
        raise EngineError(f"--order {order!r} is not one of groups, columns, none")
    if method == "awq" and bits == 8:
        raise EngineError(
            "awq is for 4 bits and fewer: at 8 its scales change next to nothing; use"
            " --method gptq or rtn"
        )
    chosen = _format(bits, method, format)
    whole_rows = chosen == "compressed-tensors"
    if symmetric is None:
        symmetric = (chosen == "gptq" and method != "awq") or whole_rows
    if whole_rows and not symmetric:
        raise EngineError("compressed-tensors INT8 with INT8 activations is symmetric")
    if whole_rows and group:
        raise EngineError(
            f"--group-size {group}: INT8 with INT8 activations has one scale a row; leave it out,"
            " or choose --format gptq"
        )
    if order == "columns" and not static_groups and chosen != "gptq":
        raise EngineError(
            f"--order columns reorders groups, which only GPTQ's format can say, not {chosen};"
            " add --static-groups or use --order groups"
        )
    if not 0 < damping < 1:
        raise EngineError(f"--damping {damping} is not between 0 and 1")
    found = 0 if whole_rows else choose_group(layers, group)
    _check_packing(layers, bits, chosen)
    return Recipe(
        *(bits, method, chosen, found, symmetric),  # type: ignore[arg-type]
        *(order, static_groups, damping, clip),  # type: ignore[arg-type]
    )


def choose_group(layers: list[LinearSpec], group: int | None) -> int:
    """`group`, else the largest usual size that divides every layer's inputs."""
    if group is None:
        for size in GROUPS:
            if all(layer.in_features % size == 0 for layer in layers):
                return size
        return choose_group(layers, GROUPS[-1])
    if group in (0, -1):
        return 0
    if group < 0 or group % _KERNEL_CHUNK:
        raise EngineError(f"--group-size {group} is not a multiple of {_KERNEL_CHUNK}")
    for layer in layers:
        if layer.in_features % group:
            fitting = [size for size in GROUPS if layer.in_features % size == 0]
            instead = f"use {fitting[0]}" if fitting else "use -1 (one group a row)"
            raise EngineError(
                f"--group-size {group} does not divide the {layer.in_features} inputs of"
                f" {layer.parts[0]}; {instead}"
            )
    return group


def _format(bits: int, method: str, asked: str) -> Format:
    if asked == "auto":
        if bits == 8:
            return "compressed-tensors"
        return "awq" if method == "awq" and bits == 4 else "gptq"
    if asked not in ("gptq", "awq", "compressed-tensors"):
        raise EngineError(f"--format {asked!r} is not one of auto, gptq, awq, compressed-tensors")
    if asked == "awq" and bits != 4:
        raise EngineError(f"AWQ's file format holds 4 bits, not {bits}; use --format gptq")
    if asked == "compressed-tensors" and bits != 8:
        raise EngineError(
            f"--format compressed-tensors writes INT8 with INT8 activations, not {bits} bits; use"
            " --format gptq or awq"
        )
    return asked  # type: ignore[return-value]


def _check_packing(layers: list[LinearSpec], bits: int, form: Format) -> None:
    """Values are packed into 32-bit words, along the input and along the output."""
    for layer in layers:
        for part, rows in zip(layer.parts, layer.out_features, strict=True):
            unfit = form == "awq" and rows % 8
            unfit = unfit or (
                form == "gptq" and (rows * bits % 32 or layer.in_features * bits % 32)
            )
            if unfit:
                raise EngineError(
                    f"{part} ({rows} x {layer.in_features}) does not fill whole words of {bits}"
                    f" bits in {form}'s format; use --to int8"
                )
