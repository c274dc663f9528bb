"""One token a row from logits, every row with its own settings, without a sort.

    z_v  = (x_v - max x) / temperature                  (temperature 0: the first maximum of x)
    K    = {v : z_v >= t_k},   t_k the top_k-th largest z          (top_k 0: all)
    P    = {v : z_v >= t_p},   t_p the largest t with  sum_{v in K, z_v >= t} e^z_v
                                                  >= top_p * sum_{v in K} e^z_v     (1: all)
    M    = {v : z_v >= log min_p}                                  (min_p 0: all)
    token = first v, by id, at which the running sum of e^z_v over K, P and M together exceeds
            u times its total,   u = uniform(seed, sample index, position)

Ties at a threshold are all kept. u is a pure function: the first 53 bits of Philox4x32-10 with key
`seed` and counter (position, sample index), so a request draws the same number wherever it runs.

Layouts
    logits        [rows, vocab_size] or wider, any float dtype, last contiguous
    bitmask       int32 [rows, at least vocab_size / 32] or None: bit i % 32 of word i // 32 says
                  whether id i is allowed
    temperature, top_p, min_p        float32 [rows]
    top_k, position                  int32 or int64 [rows]
    seed, sample_index               int64 [rows] (the bits of an unsigned number)
    tokens        int64 [rows]
    status        int32 [rows]: OK, NON_FINITE (a NaN or +inf) or NOTHING_ALLOWED (all -inf); the
                  token is 0 in the last two

One program reads one row: 1 pass for a greedy row, 3 for a drawn one, and up to 11 more for each of
top_k and top_p, which narrow the threshold's bit pattern to a ninth each.
Source of Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

import torch
import triton
import triton.language as tl

OK = 0
NON_FINITE = 1
NOTHING_ALLOWED = 2


def uniform_reference(
    seed: torch.Tensor, sample_index: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """float64 [rows] in [0, 1). Philox in Python's integers."""
    low = 0xFFFFFFFF
    values = []
    for key, sample, place in zip(
        seed.tolist(), sample_index.tolist(), position.tolist(), strict=True
    ):
        c = [place & low, (place >> 32) & low, sample & low, (sample >> 32) & low]
        k = [key & low, (key >> 32) & low]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        values.append(((c[0] << 21) | (c[1] >> 11)) * 2.0**-53)
    return torch.tensor(values, dtype=torch.float64, device=seed.device)


def kept_weights_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """e^z of the tokens that a row with temperature > 0 keeps, else 0; float64, by sorting."""
    logits = logits.double()
    z = (logits - logits.amax(1, keepdim=True)) / temperature.double()[:, None]
    k = torch.where(top_k > 0, top_k, z.shape[1]).clamp(max=z.shape[1])
    ordered = z.sort(1, descending=True).values
    in_k = z >= ordered.gather(1, k[:, None].long() - 1)
    ordered = torch.where(in_k, z, -torch.inf).sort(1, descending=True).values
    weights = ordered.exp()
    before = weights.cumsum(1) - weights
    nucleus = (before < top_p.double()[:, None] * weights.sum(1, keepdim=True)).sum(1, keepdim=True)
    limit = torch.where(top_p[:, None] < 1, ordered.gather(1, nucleus - 1), -torch.inf)
    keep = in_k & (z >= limit) & (z >= min_p.double().log()[:, None])
    return z.exp() * keep


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """int64 [rows]; logits finite or -inf, with the bitmask already applied."""
    greedy = logits.float().argmax(1)
    drawn = torch.where(temperature > 0, temperature, 1.0)
    running = kept_weights_reference(logits, drawn, top_k, top_p, min_p).cumsum(1)
    target = uniform_reference(seed, sample_index, position) * running[:, -1]
    token = (running > target[:, None]).int().argmax(1)
    return torch.where(temperature > 0, token, greedy)


def sample(
    logits: torch.Tensor,
    *,
    vocab_size: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    filtered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens, status). Columns from `vocab_size` on (padding) are not looked at.

    `filtered` False says that no row has top_k, top_p or min_p, which leaves their code out. Raises
    ValueError on a layout that the kernel does not read.
    """
    rows = logits.shape[0]
    if logits.dim() != 2 or logits.stride(1) != 1 or not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(
            f"logits {tuple(logits.shape)} must be [rows, at least {vocab_size}], last contiguous"
        )
    for name, tensor, dtypes in (
        ("temperature", temperature, (torch.float32,)),
        ("top_p", top_p, (torch.float32,)),
        ("min_p", min_p, (torch.float32,)),
        ("top_k", top_k, (torch.int32, torch.int64)),
        ("position", position, (torch.int32, torch.int64)),
        ("seed", seed, (torch.int64,)),
        ("sample_index", sample_index, (torch.int64,)),
    ):
        if tensor.shape != (rows,) or not tensor.is_contiguous() or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name} must be contiguous {dtypes[-1]} [{rows}]; got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    if bitmask is not None and (
        bitmask.dtype != torch.int32
        or bitmask.shape[0] != rows
        or bitmask.shape[1] * 32 < vocab_size
        or bitmask.stride(1) != 1
    ):
        raise ValueError(f"bitmask must be int32 [{rows}, at least {vocab_size} / 32]")
    tokens = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    status = torch.empty((rows,), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return tokens, status
    _sample_kernel[(rows,)](
        logits,
        logits if bitmask is None else bitmask,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        sample_index,
        position,
        tokens,
        status,
        logits.stride(0),
        0 if bitmask is None else bitmask.stride(0),
        vocab_size,
        HAS_BITMASK=bitmask is not None,
        FILTERED=filtered,
        BLOCK=4096,
        SEARCH_BLOCK=1024,
        num_warps=8,
    )
    return tokens, status


@triton.jit
def _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK: tl.constexpr):
    """float32 logits of `ids`; -inf beyond the vocabulary and where the bitmask forbids."""
    live = ids < vocab_size
    x = tl.load(logits_ptr + ids, mask=live, other=float("-inf")).to(tl.float32)
    if HAS_BITMASK:
        words = tl.load(bitmask_ptr + ids // 32, mask=live, other=0)
        x = tl.where((words >> (ids % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit
def _ordered(x):
    """int64 that orders as the float32 does; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _highest_threshold(
    logits_ptr,
    bitmask_ptr,
    low,
    high,
    share,
    best,
    temperature,
    vocab_size,
    COUNT: tl.constexpr,
    HAS_BITMASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t in low <= t < high, as `_ordered` numbers, for which what lies at or above t
    is enough: `share` tokens (COUNT), or `share` of the weight that lies at or above `low`."""
    PROBES: tl.constexpr = 8
    target = share
    if not COUNT:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK)
            total += tl.where(_ordered(x) >= low, tl.exp((x - best) / temperature), 0.0)
        target = share * tl.sum(total, axis=0)
    while high - low > 1:
        step = (high - low + PROBES) // (PROBES + 1)
        probes = low + step * (tl.arange(0, PROBES) + 1)
        enough = tl.zeros([BLOCK, PROBES], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK)
            if COUNT:
                weight = tl.where(ids < vocab_size, 1.0, 0.0)
            else:
                weight = tl.exp((x - best) / temperature)
            enough += tl.where(_ordered(x)[:, None] >= probes[None, :], weight[:, None], 0.0)
        held = tl.sum((tl.sum(enough, axis=0) >= target).to(tl.int64), axis=0)
        low += step * held
        high = tl.minimum(high, low + step)
    return low


@triton.jit(do_not_specialize=["bitmask_stride"])
def _sample_kernel(
    logits_ptr,
    bitmask_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    sample_index_ptr,
    position_ptr,
    tokens_ptr,
    status_ptr,
    logits_stride,
    bitmask_stride,
    vocab_size,
    HAS_BITMASK: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    bitmask_ptr += row * bitmask_stride

    # Lanes keep their own first maximum; they are compared once, at the end.
    lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
    lane_id = tl.arange(0, BLOCK)
    lane_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK)
        lane_bad |= ((x != x) | (x == float("inf"))).to(tl.int32)
        better = x > lane_best
        lane_best = tl.where(better, x, lane_best)
        lane_id = tl.where(better, ids, lane_id)
    best = tl.max(lane_best, axis=0)
    first = tl.min(tl.where(lane_best == best, lane_id, vocab_size), axis=0)
    bad = tl.max(lane_bad, axis=0)
    nothing = best == float("-inf")
    status = tl.where(bad != 0, 1, tl.where(nothing, 2, 0))
    tl.store(status_ptr + row, status)
    temperature = tl.load(temperature_ptr + row)
    token = tl.where(status == 0, first, 0).to(tl.int64)
    tl.store(tokens_ptr + row, token)
    if status != 0:
        return
    if temperature <= 0.0:
        return

    # `_ordered` of -inf, so that a token of weight 0 is harmless but counted as before a sort.
    lowest = tl.full([], -2139095041, tl.int64)
    floor = tl.full([], float("-inf"), tl.float32)
    if FILTERED:
        above = _ordered(best) + 1
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
        if (top_k > 0) & (top_k < vocab_size):
            lowest = _highest_threshold(
                logits_ptr, bitmask_ptr, lowest, above, top_k.to(tl.float32), best, temperature,
                vocab_size, True, HAS_BITMASK, SEARCH_BLOCK,
            )  # fmt: skip
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            lowest = _highest_threshold(
                logits_ptr, bitmask_ptr, lowest, above, top_p, best, temperature,
                vocab_size, False, HAS_BITMASK, SEARCH_BLOCK,
            )  # fmt: skip
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0.0:
            floor = tl.log(min_p)

    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK)
        z = (x - best) / temperature
        kept = (_ordered(x) >= lowest) & (z >= floor)
        total += tl.sum(tl.where(kept, tl.exp(z), 0.0), axis=0).to(tl.float64)

    position = tl.load(position_ptr + row).to(tl.int64)
    sample_index = tl.load(sample_index_ptr + row)
    word0, word1, _word2, _word3 = tl.philox(
        tl.load(seed_ptr + row),
        position.to(tl.uint32),
        (position >> 32).to(tl.uint32),
        sample_index.to(tl.uint32),
        (sample_index >> 32).to(tl.uint32),
    )
    bits = (word0.to(tl.int64) << 21) | (word1 >> 11).to(tl.int64)
    target = bits.to(tl.float64) * 1.1102230246251565e-16 * total

    running = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _logits_at(logits_ptr, bitmask_ptr, ids, vocab_size, HAS_BITMASK)
        z = (x - best) / temperature
        kept = (_ordered(x) >= lowest) & (z >= floor)
        weight = tl.where(kept, tl.exp(z), 0.0)
        after = running + tl.sum(weight, axis=0).to(tl.float64)
        if (running <= target) & (target < after):
            # The sum in order and the sum as a tree may round apart by a hair at the block's end:
            # then the last token with any weight is the one.
            inside = tl.cumsum(weight, axis=0).to(tl.float64)
            last = tl.max(tl.where(weight > 0.0, ids, 0), axis=0)
            beyond = (inside > target - running) & (weight > 0.0)
            found = tl.min(tl.where(beyond, ids, last), axis=0)
            tl.store(tokens_ptr + row, found.to(tl.int64))
        running = after
