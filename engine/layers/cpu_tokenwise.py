"""What the CPU computes for each token by itself: norms, gating, rope with the KV store; float32.

Each kernel is `void f(int64 *args)`: addresses and sizes, the first entry a counter from which the
threads of one launch claim work. `layers.cpu_backend` fills the arguments. Keys lie
[block, kv_head, head_dim, block_size], values [block, kv_head, block_size, head_dim].
"""

from typing import Any

from numba import carray, cfunc, njit

from headrace.engine.layers.cpu_simd import as_float, claim, exp2, floats_at, integers_at
from headrace.engine.layers.kernel_cache import choose_cache_folder
from headrace.engine.quant.kv_kernels import store_head

choose_cache_folder()

# Only what lets a sum be vectorized: numba puts these flags on every instruction, and more of them
# would undo exp2's rounding trick and hide NaN.
_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}}
_SUMS = {**_OPTIONS, "fastmath": {"contract", "reassoc", "nsz"}}
_SIGNATURE = "void(CPointer(int64))"
_LOG2_E = 1.4426950408889634


@njit(inline="always", fastmath={"contract", "reassoc", "nsz"})
def _square_sum(row: Any, size: Any) -> Any:
    total = row[0] * 0
    for i in range(size):
        total += row[i] * row[i]
    return total


@cfunc(_SIGNATURE, **_SUMS)
def add_rms_norm(args: Any) -> None:
    """args: counter, x, delta (0: none), weight, out, rows, size, eps, rows a claim."""
    a = carray(args, (9,))
    counter, x, delta, weight_at, out = a[0], a[1], a[2], a[3], a[4]
    rows, size, eps, grain = a[5], a[6], as_float(a[7]), a[8]
    weight = carray(floats_at(weight_at), (size,))
    while True:
        first = claim(counter) * grain
        if first >= rows:
            break
        for r in range(first, min(first + grain, rows)):
            source = carray(floats_at(x + 4 * r * size), (size,))
            target = carray(floats_at(out + 4 * r * size), (size,))
            if delta != 0:
                change = carray(floats_at(delta + 4 * r * size), (size,))
                for i in range(size):
                    source[i] += change[i]
            scale = 1.0 / (_square_sum(source, size) / size + eps) ** 0.5
            for i in range(size):
                target[i] = source[i] * scale * weight[i]


@cfunc(_SIGNATURE, **_OPTIONS)
def silu_mul(args: Any) -> None:
    """args: counter, gate_up, out, rows, size, rows a claim."""
    a = carray(args, (6,))
    counter, gate_up, out, rows, size, grain = a[0], a[1], a[2], a[3], a[4], a[5]
    while True:
        first = claim(counter) * grain
        if first >= rows:
            break
        for r in range(first, min(first + grain, rows)):
            gate = carray(floats_at(gate_up + 8 * r * size), (size,))
            up = carray(floats_at(gate_up + 8 * r * size + 4 * size), (size,))
            target = carray(floats_at(out + 4 * r * size), (size,))
            for i in range(size):
                decay = exp2(min(gate[i] * -_LOG2_E, 126.0))
                target[i] = gate[i] / (1 + decay) * up[i]


@njit(inline="always")
def _rotate(head: Any, cos: Any, sin: Any, half: Any, scale: Any) -> None:
    for i in range(half):
        first, second = head[i], head[i + half]
        head[i] = (first * cos[i] - second * sin[i]) * scale
        head[i + half] = (second * cos[i] + first * sin[i]) * scale


@njit(inline="always")
def _normalize(head: Any, weight: Any, size: Any, eps: Any) -> None:
    scale = 1.0 / (_square_sum(head, size) / size + eps) ** 0.5
    for i in range(size):
        head[i] = head[i] * scale * weight[i]


@cfunc(_SIGNATURE, **_SUMS)
def rope_and_store(args: Any) -> None:
    """args: counter, qkv, tokens, heads, kv heads, head_dim, cos, sin, positions, slots, keys,
    values, block size, query scale, query norm (0: none), key norm, eps, tokens a claim, kind of
    keys and values (0 float32, else as `quant.kv_kernels` numbers them), key scales, value scales.

    Queries are rotated in place and scaled for base-2 softmax.
    """
    a = carray(args, (21,))
    counter, qkv, tokens, heads, kv_heads, head_dim = a[0], a[1], a[2], a[3], a[4], a[5]
    cos_at, sin_at, keys, values, block_size = a[6], a[7], a[10], a[11], a[12]
    scale, eps, grain, kind = as_float(a[13]), as_float(a[16]), a[17], a[18]
    positions = carray(integers_at(a[8]), (tokens,))
    slots = carray(integers_at(a[9]), (tokens,))
    half = head_dim // 2
    normed = a[14] != 0
    query_norm = carray(floats_at(a[14]), (head_dim,))
    key_norm = carray(floats_at(a[15]), (head_dim,))
    width = (heads + 2 * kv_heads) * head_dim
    while True:
        first = claim(counter) * grain
        if first >= tokens:
            break
        for t in range(first, min(first + grain, tokens)):
            cos = carray(floats_at(cos_at + 4 * positions[t] * half), (half,))
            sin = carray(floats_at(sin_at + 4 * positions[t] * half), (half,))
            block, offset = slots[t] // block_size, slots[t] % block_size
            row = qkv + 4 * t * width
            for h in range(heads):
                head = carray(floats_at(row + 4 * h * head_dim), (head_dim,))
                if normed:
                    _normalize(head, query_norm, head_dim, eps)
                _rotate(head, cos, sin, half, scale)
            for g in range(kv_heads):
                head = carray(floats_at(row + 4 * (heads + g) * head_dim), (head_dim,))
                if normed:
                    _normalize(head, key_norm, head_dim, eps)
                _rotate(head, cos, sin, half, 1.0)
                place = (block * kv_heads + g) * head_dim * block_size
                if kind != 0:
                    at = 4 * ((block * kv_heads + g) * block_size + offset)
                    key = row + 4 * (heads + g) * head_dim
                    store_head(key, head_dim, kind, keys + place + offset, block_size, a[19] + at)
                    value = key + 4 * kv_heads * head_dim
                    to = values + place + offset * head_dim
                    store_head(value, head_dim, kind, to, 1, a[20] + at)
                    continue
                columns = carray(
                    floats_at(keys + 4 * (place + offset)), ((head_dim - 1) * block_size + 1,)
                )
                for i in range(head_dim):
                    columns[i * block_size] = head[i]
                source = carray(floats_at(row + 4 * (heads + kv_heads + g) * head_dim), (head_dim,))
                target = carray(floats_at(values + 4 * (place + offset * head_dim)), (head_dim,))
                for i in range(head_dim):
                    target[i] = source[i]
