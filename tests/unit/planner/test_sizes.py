"""Weight and KV sizes against the published figures of public models."""

import pytest

from headrace.engine.planner import catalog
from headrace.engine.planner.kv import kv_bytes_per_token, kv_sequence_bytes
from headrace.engine.planner.schemes import parse_scheme
from headrace.engine.planner.weights import weight_bytes

# name, parameters (B), GB in BF16, INT8, INT4-g128, INT3-g128; KV KiB a token; GiB at 2k, 8k, 32k
TABLE = """
Qwen2-0.5B     0.494   0.99  0.63  0.46  0.41   12   .023  .094  .375
Qwen2.5-0.5B   0.494   0.99  0.63  0.46  0.41   12   .023  .094  .375
Qwen2-1.5B     1.544   3.09  1.78  1.15  0.98   28   .055  .219  .875
Qwen2.5-1.5B   1.544   3.09  1.78  1.15  0.98   28   .055  .219  .875
Qwen2.5-3B     3.086   6.17  3.40  2.06  1.71   36   .070  .281  1.13
Qwen2-7B       7.616  15.23  8.71  5.57  4.75   56   .109  .4375 1.75
Qwen2.5-7B     7.616  15.23  8.71  5.57  4.75   56   .109  .4375 1.75
Qwen2.5-14B   14.770  29.54 16.33  9.98  8.32  192   .375  1.5   6.0
Qwen2.5-32B   32.764  65.53 34.32 19.33 15.40  256   .5    2.0   8.0
Qwen2-72B     72.706 145.41 75.20 41.46 32.62  320   .625  2.5  10.0
Qwen2.5-72B   72.706 145.41 75.20 41.46 32.62  320   .625  2.5  10.0
Qwen3-0.6B     0.596   1.19  0.75  0.54  0.48  112   .219  .875  3.5
Qwen3-1.7B     1.721   3.44  2.03  1.35  1.18  112   .219  .875  3.5
Qwen3-4B       4.022   8.04  4.41  2.67  2.21  144   .281  1.125 4.5
Qwen3-8B       8.191  16.38  9.44  6.10  5.22  144   .281  1.125 4.5
Qwen3-14B     14.768  29.54 16.32  9.98  8.31  160   .3125 1.25  5.0
Qwen3-32B     32.762  65.52 34.32 19.33 15.39  256   .5    2.0   8.0
Llama-2-7B     6.738  13.48  7.00  3.89  3.07  512  1.0    4.0  16.0
Llama-2-13B   13.016  26.03 13.34  7.25  5.65  800  1.56   6.25 25.0
Llama-3-8B     8.030  16.06  9.08  5.73  4.85  128   .25   1.0   4.0
Llama-3.1-8B   8.030  16.06  9.08  5.73  4.85  128   .25   1.0   4.0
Llama-3-70B   70.554 141.11 72.66 39.77 31.14  320   .625  2.5  10.0
Llama-3.1-70B 70.554 141.11 72.66 39.77 31.14  320   .625  2.5  10.0
Llama-3.2-1B   1.236   2.47  1.50  1.03  0.91   32   .0625  .25  1.0
Llama-3.2-3B   3.213   6.43  3.61  2.25  1.90  112   .219  .875  3.5
Mistral-7B-v0.3 7.248 14.50  7.52  4.16  3.28  128   .25   1.0   4.0
SmolLM2-135M   0.135   0.27  0.16  0.11  0.10   22.5 .044  .176   .70
SmolLM2-1.7B   1.711   3.42  1.81  1.04  0.84  192   .375  1.5   6.0
Gemma-2-2B     2.614   5.23  3.20  2.23  1.98  104   .203   .81  3.25
Gemma-2-9B     9.241  18.48 10.16  6.16  5.11  336   .656  2.63 10.5
Phi-3-mini-4k  3.821   7.64  4.02  2.28  1.82  384   .75   3.0  12.0
Phi-4         14.660  29.32 15.69  9.14  7.42  200   .39   1.56  6.25
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]


def assert_close(actual: float, printed: str, relative: float) -> None:
    """Within `relative`, or within half a unit of the last printed digit where that is more."""
    expected = float(printed)
    digits = len(printed.partition(".")[2])
    assert abs(actual - expected) <= max(relative * expected, 0.5 * 10**-digits + 1e-9), (
        f"{actual} is not {printed}"
    )


@pytest.mark.parametrize("row", ROWS, ids=[r[0] for r in ROWS])
def test_parameters_agree_with_the_published_count(row: list[str]) -> None:
    assert_close(catalog.shape(row[0]).num_params / 1e9, row[1], 0.001)


@pytest.mark.parametrize("row", ROWS, ids=[r[0] for r in ROWS])
def test_weight_bytes_agree_with_the_table(row: list[str]) -> None:
    shape = catalog.shape(row[0])
    for name, printed in zip(("bf16", "int8", "int4-g128", "int3-g128"), row[2:6], strict=True):
        assert_close(weight_bytes(shape, parse_scheme(name)).total / 1e9, printed, 0.01)


@pytest.mark.parametrize("row", ROWS, ids=[r[0] for r in ROWS])
def test_kv_bytes_agree_with_the_table(row: list[str]) -> None:
    """The table's lengths ignore sliding windows, which the next tests add."""
    shape = catalog.shape(row[0])
    assert kv_bytes_per_token(shape) / 1024 == float(row[6])
    for length, printed in zip((2048, 8192, 32768), row[7:], strict=True):
        gib = kv_sequence_bytes(shape, length, windows=False) / 2**30
        assert_close(gib, printed, 0.01)


@pytest.mark.parametrize(
    ("mixture", "bits"),
    [
        ("q4_k_m", 4.8944),
        ("q5_k_m", 5.7036),
        ("q6_k", 6.5633),
        ("q8_0", 8.5008),
        ("q3_k_s", 3.6429),
    ],
)
def test_gguf_mixtures_have_the_bits_llama_cpp_publishes(mixture: str, bits: float) -> None:
    """llama.cpp's own table for Llama-3.1-8B (bits a weight, whole file)."""
    shape = catalog.shape("Llama-3.1-8B")
    total = weight_bytes(shape, parse_scheme(f"gguf-{mixture}")).total
    assert total * 8 / shape.num_params == pytest.approx(bits, abs=1e-3)


def test_k_quants_fall_back_where_rows_are_no_multiple_of_256() -> None:
    """SmolLM2-135M is 576 wide: Q4_K becomes Q5_0 and Q6_K becomes Q8_0, except in down (1536).

    q, k, o, gate, up at 5.5 bits and the tied head at 8.5 make it larger than 4.89 bits by far.
    """
    shape = catalog.shape("SmolLM2-135M")
    total = weight_bytes(shape, parse_scheme("gguf-q4_k_m")).total
    assert 6.0 < total * 8 / shape.num_params < 6.6


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ("int4-g128", 4 + 20 / 128),
        ("int4-g128-sym", 4 + 16 / 128),
        ("int4-g64", 4 + 20 / 64),
        ("int4-g32", 4 + 20 / 32),
        ("int3-g128", 3 + 19 / 128),
        ("int3-g32-sym", 3.5),
        ("awq-g128", 4 + 20 / 128),
        ("nf4", 4 + 32 / 64),
        ("nf4-double", 4 + 8 / 64 + 32 / (64 * 256)),
        ("int8", 8.0),
        ("fp8-block", 8 + 32 / 128**2),
        ("fp32", 32.0),
    ],
)
def test_a_scheme_takes_its_bits_a_weight(scheme: str, bits: float) -> None:
    """4096 x 4096: packed values, a 16-bit scale and a packed zero point for each group."""
    size = parse_scheme(scheme).matrix_bytes(4096, 4096, 2)
    assert size * 8 / 4096**2 == pytest.approx(bits, rel=2e-3)


def test_gptq_adds_an_index_a_column() -> None:
    """g_idx is an int32 for each of the 4096 input columns, written even without act-order."""
    gptq = parse_scheme("gptq-int4-g128").matrix_bytes(1024, 4096, 2)
    assert gptq - parse_scheme("awq-g128").matrix_bytes(1024, 4096, 2) == 4 * 4096


def test_a_last_short_group_has_its_own_scale() -> None:
    """576 columns in groups of 128 are 5 groups: 288 bytes of values, 5 scales, 2.5 of zeros."""
    assert parse_scheme("int4-g128").matrix_bytes(2, 576, 2) == 2 * 288 + 2 * 5 * 2 + 5


def test_memory_the_publisher_measured_for_qwen2_7b() -> None:
    """Qwen2-7B on an A100: BF16 14.92, GPTQ-Int8 8.97, GPTQ-Int4 6.06, AWQ 5.93 (GiB).

    What BF16 takes above its weights is the run's own memory; with it the others follow.
    """
    shape = catalog.shape("Qwen2-7B")

    def gib(scheme: str) -> float:
        return weight_bytes(shape, parse_scheme(scheme)).total / 2**30

    run_time = 14.92 - gib("bf16")
    assert 0.3 < run_time < 1.0
    for scheme, measured in (("gptq-int8-g128", 8.97), ("gptq", 6.06), ("awq", 5.93)):
        assert gib(scheme) + run_time == pytest.approx(measured, rel=0.03)


def test_windowed_layers_keep_their_window_only() -> None:
    """Gemma-2-2B at 32,768: 13 layers hold it all, 13 hold 4,096: 1.625 + 0.203 GiB."""
    shape = catalog.shape("Gemma-2-2B")
    expected = 13 * (32768 + 4096) * 2 * 4 * 256 * 2
    assert kv_sequence_bytes(shape, 32768) == expected
    assert kv_sequence_bytes(shape, 4096) == 4096 * kv_bytes_per_token(shape)


def test_a_window_in_blocks_keeps_one_block_more() -> None:
    shape = catalog.shape("Mistral-7B-v0.1")
    tokens = kv_sequence_bytes(shape, 20000, block_size=16) // kv_bytes_per_token(shape)
    assert tokens == 4096 + 16
    assert kv_sequence_bytes(shape, 17, block_size=16) == 32 * kv_bytes_per_token(shape)


def test_eight_bit_kv_halves_and_its_scales_are_counted() -> None:
    """Two float32 scales a head and layer beside 2 x 128 bytes of values."""
    shape = catalog.shape("Llama-3-8B")
    assert kv_bytes_per_token(shape, "fp8", scales=False) * 2 == kv_bytes_per_token(shape)
    assert kv_bytes_per_token(shape, "int8") == 32 * 2 * 8 * (128 + 4)


@pytest.mark.parametrize(("cards", "share"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_kv_heads_are_copied_beyond_their_number(cards: int, share: int) -> None:
    """Qwen2-7B has 4 key-value heads: on 8 cards each still holds one."""
    shape = catalog.shape("Qwen2-7B")
    assert kv_bytes_per_token(shape, tensor_parallel=cards) * share == kv_bytes_per_token(shape)


def test_cards_of_a_split_hold_all_weights_and_the_copied_ones_twice() -> None:
    """8 cards, 4 key-value heads: k and v twice, norms and biases eight times, the rest once."""
    shape = catalog.shape("Qwen2-72B")
    scheme = parse_scheme("bf16")
    whole = weight_bytes(shape, scheme).total
    assert 8 * weight_bytes(shape, scheme, tensor_parallel=8).total == pytest.approx(
        whole, rel=1e-3
    )
    small = catalog.shape("Qwen3-30B-A3B")
    kv = 2 * small.num_layers * small.kv_size * small.hidden_size * 2
    vectors = small.num_vector_params * 2
    routers = small.num_layers * 128 * small.hidden_size * 2
    split = 8 * weight_bytes(small, scheme, tensor_parallel=8).total
    assert split == weight_bytes(small, scheme).total + kv + 7 * (vectors + routers)
