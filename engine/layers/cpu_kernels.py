"""Compiled CPU kernels: norms, gating, rope with the KV store, and paged attention, in float32.

Each kernel is `void f(int64 *args)`: addresses and sizes, the first entry a counter from which the
threads of one launch claim work. `layers.cpu_backend` fills the arguments. Keys lie
[block, kv_head, head_dim, block_size], values [block, kv_head, block_size, head_dim].
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from headrace.engine.layers.cpu_simd import (
    BYTE_SCORE_BLOCKS,
    BYTE_SCORE_TILES,
    LANES,
    LOWEST,
    MIX_TILES,
    MIX_VECTORS,
    SCORE_BLOCKS,
    SCORE_TILES,
    STATE_FLOATS,
    as_float,
    byte_score_tiles,
    claim,
    exp2,
    floats_at,
    integers_at,
    mix_tiles,
    prefetch,
    score_tiles,
    softmax_step,
    sum_of_lanes,
)
from headrace.engine.layers.kernel_cache import choose_cache_folder
from headrace.engine.quant.kv_kernels import load_keys, load_values, store_head

choose_cache_folder()

# Only what lets a sum be vectorized: numba puts these flags on every instruction, and more of them
# would undo exp2's rounding trick and hide NaN.
_OPTIONS: dict[str, Any] = {
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract"},
}
_SUMS = {**_OPTIONS, "fastmath": {"contract", "reassoc", "nsz"}}
_SIGNATURE = "void(CPointer(int64))"
_LOG2_E = 1.4426950408889634

CHUNK = 64
"""Keys that a tile of queries looks at before its softmax moves on."""

PREFETCH_ROWS = 8
"""Up to so many query rows, keys and values are read faster than the processor fetches them by
itself, so they are asked for ahead (64 decodes over 201 keys of 3 heads of 64: 2.16 -> 1.3 ms on
one core)."""

TILE_FIELDS = 6
"""Of a tile of queries: first entry and count in the token list, block table row, first and last
key position (exclusive), and what to do with the running state (START, SAVE, RESUME)."""
START, SAVE, RESUME = 0, 1, 2


def scratch_floats(rows: int, head_dim: int, chunk: int = CHUNK) -> int:
    """float32 entries of work space that one thread of the attention kernel needs."""
    addresses = 4 * 2 * (chunk // LANES)  # four lists of int64
    unpacked = 2 * chunk * head_dim  # keys and values that are held in 8 bits
    return rows * (2 * head_dim + chunk + STATE_FLOATS) + addresses + unpacked + 2 * LANES


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


def _score_rows(sizes: Sequence[int], tiles: Sequence[Callable[..., Any]]) -> Any:
    """scores of any number of rows: the largest tile as often as it fits, then the next."""
    size, tile = sizes[0], tiles[0]
    if len(sizes) == 1:

        @njit
        def rest(
            rows: Any, query: Any, keys: Any, stride: Any, head_dim: Any, scores: Any, chunk: Any
        ) -> None:
            return

    else:
        rest = _score_rows(sizes[1:], tiles[1:])

    @njit
    def run(
        rows: Any, query: Any, keys: Any, stride: Any, head_dim: Any, scores: Any, chunk: Any
    ) -> None:
        row = 0
        while rows - row >= size:
            tile(
                query + 4 * row * head_dim, keys, stride, head_dim, scores + 4 * row * chunk, chunk
            )
            row += size
        if row < rows:
            rest(
                rows - row,
                query + 4 * row * head_dim,
                keys,
                stride,
                head_dim,
                scores + 4 * row * chunk,
                chunk,
            )

    return run


def _mix_rows(sizes: Sequence[int], tiles: Sequence[Callable[..., Any]]) -> Any:
    """Weighted values of any number of rows, for one group of columns."""
    size, tile = sizes[0], tiles[0]
    if len(sizes) == 1:

        @njit
        def rest(
            rows: Any, weights: Any, chunk: Any, values: Any, column: Any, n: Any, d: Any, out: Any
        ) -> None:
            return

    else:
        rest = _mix_rows(sizes[1:], tiles[1:])

    @njit
    def run(
        rows: Any, weights: Any, chunk: Any, values: Any, column: Any, n: Any, d: Any, out: Any
    ) -> None:
        row = 0
        while rows - row >= size:
            tile(weights + 4 * row * chunk, chunk, values, column, n, d, out + 4 * row * d)
            row += size
        if row < rows:
            rest(
                rows - row,
                weights + 4 * row * chunk,
                chunk,
                values,
                column,
                n,
                d,
                out + 4 * row * d,
            )

    return run


_scores_wide = _score_rows(SCORE_TILES, score_tiles(SCORE_BLOCKS))
_scores_narrow = _score_rows(SCORE_TILES, score_tiles(1))
_mix_wide = _mix_rows(MIX_TILES, mix_tiles(MIX_VECTORS))
_mix_narrow = _mix_rows(MIX_TILES, mix_tiles(1))
_scores_bytes_wide = _score_rows(BYTE_SCORE_TILES, byte_score_tiles(BYTE_SCORE_BLOCKS))
_scores_bytes_narrow = _score_rows(BYTE_SCORE_TILES, byte_score_tiles(1))
_mix_bytes_wide = _mix_rows(MIX_TILES, mix_tiles(MIX_VECTORS, signed_bytes=True))
_mix_bytes_narrow = _mix_rows(MIX_TILES, mix_tiles(1, signed_bytes=True))


@njit(inline="always")
def _scale_columns(rows: Any, scores: Any, chunk: Any, vectors: Any, scales: Any) -> None:
    """Multiply every row of scores by the scales of its keys, LANES at each address of a list."""
    addresses = carray(integers_at(scales), (vectors,))
    for v in range(vectors):
        factors = carray(floats_at(addresses[v]), (LANES,))
        for row in range(rows):
            part = carray(floats_at(scores + 4 * (row * chunk + v * LANES)), (LANES,))
            for lane in range(LANES):
                part[lane] *= factors[lane]


@cfunc(_SIGNATURE, **_OPTIONS)
def paged_attention(args: Any) -> None:
    """args: counter, thread counter, query (row 0), its token stride, out, state, tiles, number of
    tiles, tokens, positions, block tables, table stride, keys, values, heads, kv heads, head_dim,
    block size, window (0: none), scratch, scratch stride, kind of keys and values (see
    rope_and_store), key scales, value scales, kv heads a claim (of one tile: a divisor of them),
    rows up to which int8 is widened in registers, in each tile anew (others share what is widened
    once; the bits differ).

    A piece of work is one tile of queries and one kv head: the rows are its tokens' query heads of
    that group. Keys are taken CHUNK at a time with an online softmax. Its state (STATE_FLOATS a
    row, and the unscaled output in `out`) may be saved by one launch and resumed by the next: that
    is how attention to a shared prefix is merged with attention to a sequence's own keys.
    """
    a = carray(args, (26,))
    counter, query_at, query_stride, out_at, state_at = a[0], a[2], a[3], a[4], a[5]
    num_tiles, table_stride, keys_at, values_at = a[7], a[11], a[12], a[13]
    heads, kv_heads, head_dim, block_size, window = a[14], a[15], a[16], a[17], a[18]
    tiles = carray(integers_at(a[6]), (num_tiles, TILE_FIELDS))
    group = heads // kv_heads
    block_floats = head_dim * block_size
    kind, grain = a[21], a[24]

    scratch = a[19] + 4 * a[20] * claim(a[1])
    key_list_at = scratch
    value_list_at = key_list_at + 8 * (CHUNK // LANES)
    key_scales_at = value_list_at + 8 * (CHUNK // LANES)
    value_scales_at = key_scales_at + 8 * (CHUNK // LANES)
    scores_at = value_scales_at + 8 * (CHUNK // LANES)
    key_list = carray(integers_at(key_list_at), (CHUNK // LANES,))
    value_list = carray(integers_at(value_list_at), (CHUNK // LANES,))
    key_scales = carray(integers_at(key_scales_at), (CHUNK // LANES,))
    value_scales = carray(integers_at(value_scales_at), (CHUNK // LANES,))

    work, left = 0, 0
    while True:
        if left == 0:
            work, left = claim(counter) * grain, grain
        if work >= num_tiles * kv_heads:
            break
        tile, g = work // kv_heads, work % kv_heads
        work, left = work + 1, left - 1
        first_token, count = tiles[tile, 0], tiles[tile, 1]
        begin, end, mode = tiles[tile, 3], tiles[tile, 4], tiles[tile, 5]
        tokens = carray(integers_at(a[8] + 8 * first_token), (count,))
        positions = carray(integers_at(a[9]), (1 << 40,))
        table = carray(integers_at(a[10] + 8 * tiles[tile, 2] * table_stride), (table_stride,))
        rows = count * group
        direct = kind == 1 and rows <= a[25]
        key_stride = block_size if kind == 0 or direct else LANES
        element = 1 if direct else 4
        local_query = scores_at + 4 * rows * CHUNK
        local_out = local_query + 4 * rows * head_dim
        local_state = local_out + 4 * rows * head_dim
        unpacked_keys = local_state + 4 * STATE_FLOATS * rows
        unpacked_values = unpacked_keys + 4 * CHUNK * head_dim

        for i in range(count):
            for h in range(group):
                row = i * group + h
                head = g * group + h
                source = carray(
                    floats_at(query_at + 4 * (tokens[i] * query_stride + head * head_dim)),
                    (head_dim,),
                )
                target = carray(floats_at(local_query + 4 * row * head_dim), (head_dim,))
                total = carray(floats_at(local_out + 4 * row * head_dim), (head_dim,))
                state = carray(floats_at(local_state + 4 * STATE_FLOATS * row), (STATE_FLOATS,))
                for d in range(head_dim):
                    target[d] = source[d]
                if mode == RESUME:
                    place = tokens[i] * heads + head
                    saved = carray(floats_at(out_at + 4 * place * head_dim), (head_dim,))
                    saved_state = carray(
                        floats_at(state_at + 4 * STATE_FLOATS * place), (STATE_FLOATS,)
                    )
                    for d in range(head_dim):
                        total[d] = saved[d]
                    for lane in range(STATE_FLOATS):
                        state[lane] = saved_state[lane]
                else:
                    for d in range(head_dim):
                        total[d] = 0.0
                    state[0] = LOWEST
                    for lane in range(1, STATE_FLOATS):
                        state[lane] = 0.0

        if window > 0:
            oldest = positions[tokens[0]] - window + 1
            if oldest > begin:
                begin = oldest // CHUNK * CHUNK
        while begin < end:
            num_keys = min(CHUNK, end - begin)
            vectors = (num_keys + LANES - 1) // LANES
            for v in range(vectors):
                at = begin + v * LANES
                block = table[at // block_size]
                part = at % block_size // LANES
                base = (block * kv_heads + g) * block_floats
                scales = 4 * ((block * kv_heads + g) * block_size + part * LANES)
                if kind != 0 and not direct:
                    key_list[v] = unpacked_keys + 4 * v * LANES * head_dim
                    value_list[v] = unpacked_values + 4 * v * LANES * head_dim
                    load_keys(
                        keys_at + base + part * LANES, block_size, head_dim, kind,
                        a[22] + scales, key_list[v],
                    )  # fmt: skip
                    load_values(
                        values_at + base + part * LANES * head_dim, LANES, head_dim, kind,
                        a[23] + scales, value_list[v],
                    )  # fmt: skip
                    continue
                key_list[v] = keys_at + element * (base + part * LANES)
                value_list[v] = values_at + element * (base + part * LANES * head_dim)
                key_scales[v], value_scales[v] = a[22] + scales, a[23] + scales
                if rows <= PREFETCH_ROWS:
                    prefetch(value_list[v], element * LANES * head_dim)
            v = 0
            if direct:
                while v + BYTE_SCORE_BLOCKS <= vectors:
                    _scores_bytes_wide(
                        rows, local_query, key_list_at + 8 * v, key_stride, head_dim,
                        scores_at + 4 * v * LANES, CHUNK,
                    )  # fmt: skip
                    v += BYTE_SCORE_BLOCKS
                while v < vectors:
                    _scores_bytes_narrow(
                        rows, local_query, key_list_at + 8 * v, key_stride, head_dim,
                        scores_at + 4 * v * LANES, CHUNK,
                    )  # fmt: skip
                    v += 1
                _scale_columns(rows, scores_at, CHUNK, vectors, key_scales_at)
            while v + SCORE_BLOCKS <= vectors:
                _scores_wide(
                    rows, local_query, key_list_at + 8 * v, key_stride, head_dim,
                    scores_at + 4 * v * LANES, CHUNK,
                )  # fmt: skip
                v += SCORE_BLOCKS
            while v < vectors:
                _scores_narrow(
                    rows, local_query, key_list_at + 8 * v, key_stride, head_dim,
                    scores_at + 4 * v * LANES, CHUNK,
                )  # fmt: skip
                v += 1
            for i in range(count):
                last = positions[tokens[i]]
                high = min(num_keys, last + 1 - begin)
                low = 0
                if window > 0:
                    low = min(max(0, last - window + 1 - begin), max(high, 0))
                for h in range(group):
                    row = i * group + h
                    shrink = softmax_step(
                        scores_at + 4 * row * CHUNK, vectors, low, max(high, low),
                        local_state + 4 * STATE_FLOATS * row,
                    )  # fmt: skip
                    if shrink != 1.0:
                        total = carray(floats_at(local_out + 4 * row * head_dim), (head_dim,))
                        for d in range(head_dim):
                            total[d] *= shrink
            if (kind == 0 or direct) and rows <= PREFETCH_ROWS:
                # The next keys of this head, at its end the first ones of the next.
                soon, next_g = begin + CHUNK, g
                if soon >= end and left > 0:
                    soon, next_g = tiles[tile, 3], g + 1
                for v in range((min(CHUNK, end - soon) + LANES - 1) // LANES):
                    at = soon + v * LANES
                    base = (table[at // block_size] * kv_heads + next_g) * block_floats
                    prefetch(
                        keys_at + element * (base + at % block_size // LANES * LANES),
                        element * LANES * head_dim,
                    )
            column = 0
            if direct:
                _scale_columns(rows, scores_at, CHUNK, vectors, value_scales_at)
                while column + MIX_VECTORS * LANES <= head_dim:
                    _mix_bytes_wide(
                        rows, scores_at, CHUNK, value_list_at, column, num_keys, head_dim, local_out
                    )
                    column += MIX_VECTORS * LANES
                while column < head_dim:
                    _mix_bytes_narrow(
                        rows, scores_at, CHUNK, value_list_at, column, num_keys, head_dim, local_out
                    )
                    column += LANES
            while column + MIX_VECTORS * LANES <= head_dim:
                _mix_wide(
                    rows, scores_at, CHUNK, value_list_at, column, num_keys, head_dim, local_out
                )
                column += MIX_VECTORS * LANES
            while column < head_dim:
                _mix_narrow(
                    rows, scores_at, CHUNK, value_list_at, column, num_keys, head_dim, local_out
                )
                column += LANES
            begin += CHUNK

        for i in range(count):
            for h in range(group):
                row = i * group + h
                place = tokens[i] * heads + g * group + h
                total = carray(floats_at(local_out + 4 * row * head_dim), (head_dim,))
                state = carray(floats_at(local_state + 4 * STATE_FLOATS * row), (STATE_FLOATS,))
                target = carray(floats_at(out_at + 4 * place * head_dim), (head_dim,))
                if mode == SAVE:
                    saved_state = carray(
                        floats_at(state_at + 4 * STATE_FLOATS * place), (STATE_FLOATS,)
                    )
                    for lane in range(STATE_FLOATS):
                        saved_state[lane] = state[lane]
                    scale = np.float32(1.0)
                else:
                    scale = np.float32(1.0) / sum_of_lanes(
                        local_state + 4 * (STATE_FLOATS * row + 1)
                    )
                for d in range(head_dim):
                    target[d] = total[d] * scale
