"""The CPU's paged attention: queries of any mix of prompts and decodes against keys and values in
blocks, with an online softmax; float32 arithmetic, keys and values float32 or 8 bits.

One kernel, `void f(int64 *args)`: addresses and sizes, the first entry a counter from which the
threads of one launch claim work. `layers.cpu_backend` fills the arguments and cuts the tiles. Keys
lie [block, kv_head, head_dim, block_size], values [block, kv_head, block_size, head_dim].
"""

from typing import Any

import numpy as np
from numba import carray, cfunc, njit

from headrace.engine.layers.cpu_attention_tiles import (
    BYTE_SCORE_BLOCKS,
    LOWEST,
    MIX_VECTORS,
    SCORE_BLOCKS,
    STATE_FLOATS,
    mix_rows,
    score_rows,
    softmax_step,
)
from headrace.engine.layers.cpu_simd import (
    LANES,
    claim,
    floats_at,
    integers_at,
    prefetch,
    sum_of_lanes,
)
from headrace.engine.layers.kernel_cache import choose_cache_folder
from headrace.engine.quant.kv_kernels import load_keys, load_values

choose_cache_folder()

# Only what lets a sum be vectorized: numba puts these flags on every instruction, and more of them
# would undo exp2's rounding trick and hide NaN.
_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy", "fastmath": {"contract"}}

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


_scores_wide = score_rows(SCORE_BLOCKS)
_scores_narrow = score_rows(1)
_scores_bytes_wide = score_rows(BYTE_SCORE_BLOCKS, signed_bytes=True)
_scores_bytes_narrow = score_rows(1, signed_bytes=True)
_mix_wide = mix_rows(MIX_VECTORS)
_mix_narrow = mix_rows(1)
_mix_bytes_wide = mix_rows(MIX_VECTORS, signed_bytes=True)
_mix_bytes_narrow = mix_rows(1, signed_bytes=True)


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


@cfunc("void(CPointer(int64))", **_OPTIONS)
def paged_attention(args: Any) -> None:
    """args: counter, thread counter, query (row 0), its token stride, out, state, tiles, number of
    tiles, tokens, positions, block tables, table stride, keys, values, heads, kv heads, head_dim,
    block size, window (0: none), scratch, scratch stride, kind of keys and values (as for
    `cpu_tokenwise`), key scales, value scales, kv heads a claim (of one tile: a divisor of them),
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
