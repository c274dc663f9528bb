"""What becomes of a GGUF file's blocks when nothing is asked for, and what to ask for instead."""

from headrace.engine.planner.candidates import Candidate
from headrace.engine.planner.resolve import Model
from headrace.engine.planner.support import FLOATS_UP_TO

_GIB = 2**30


def about_blocks(model: Model, best: Candidate) -> list[str]:
    """A sentence where the model is a GGUF file of blocks and runs on a CPU; on cards a row's own
    notes say that blocks are not multiplied there."""
    stored = model.stored
    if stored is None or stored.scheme.kind != "gguf" or stored.scheme.bits >= 16:
        return []
    if best.gpu != "cpu" or stored.num_params is None:
        return []
    floats, blocks = 4 * stored.num_params, stored.weights.total
    kept = f"{blocks / 1e6:,.1f} MB instead of {floats / 1e6:,.1f} MB"
    limit = f"{FLOATS_UP_TO / _GIB:g} GiB of float32"
    if best.scheme == stored.scheme.name:
        if floats > FLOATS_UP_TO:
            return [f"The file's blocks stay packed, as all above {limit} do: {kept}."]
        return [
            f"Give --quantization gguf: a file of up to {limit} is run as floats otherwise."
            f" Packed it is {kept}, faster one request at a time and slower in batches."
        ]
    if best.scheme != "fp32":
        return []
    if floats > FLOATS_UP_TO:
        return [f"Give --quantization float: above {limit} the file's blocks stay packed."]
    return [
        f"The file's blocks become floats when it is loaded, which is the default up to {limit} and"
        f" faster in batches; --quantization gguf keeps them packed: {kept}."
    ]
