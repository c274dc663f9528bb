"""Every scheme's layers on the Triton kernels (here in Triton's interpreter): the same products as
from the floats that the checkpoint's values stand for, in no more memory than on a CPU."""

from pathlib import Path

import pytest
import torch
from weights import Given

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.loading.source import open_checkpoint
from headrace.engine.models.decoder import head_spec, layer_specs
from headrace.engine.quant.bitsandbytes import LoadedCodes
from headrace.engine.quant.choose import choose_scheme, load_time_method
from headrace.engine.quant.device_matrix import DeviceMatrix
from headrace.engine.quant.fp8 import Fp8
from headrace.engine.quant.gguf_blocks import BlockMatrix
from headrace.engine.quant.gptq import GPTQ, GPTQConfig
from headrace.engine.quant.int8_dynamic import Int8Dynamic
from headrace.engine.quant.integer import Integer
from headrace.engine.quant.llm_int8 import LLMInt8
from headrace.engine.quant.method import AnyMethod, LinearSpec, weight_bytes
from headrace.engine.runner import load_runner

CPU = torch.device("cpu")
DATA = Path(__file__).parents[2] / "data" / "quant"
INTEGER_ACTIVATIONS = (Int8Dynamic,)


@pytest.fixture(autouse=True)
def on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_BACKEND", "triton")


def check(
    method: AnyMethod,
    spec: LinearSpec,
    source: TensorSource,
    dtype: torch.dtype,
    batches: tuple[int, ...] = (1, 5),
    tolerance: float = 2e-4,
) -> None:
    """One row and five take different kernels."""
    stored = method.create_weights(spec, source, dtype, CPU)
    weights = method.process(stored)
    in_whole_tiles = -(-spec.in_features // 256) * 256 / spec.in_features
    assert weight_bytes(weights) <= in_whole_tiles * weight_bytes(stored) + 4096
    expected_weight = method.dequantize(stored)
    bias = stored.bias if spec.bias else torch.zeros(sum(spec.out_features))
    x = torch.randn(5, spec.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rows in batches:
        y = method.apply(weights, x[:rows])
        assert y.dtype == dtype
        if isinstance(method, INTEGER_ACTIVATIONS):
            expected = method.apply(stored, x[:rows].float())
        else:
            expected = x[:rows].float() @ expected_weight.T + bias
        tolerance = tolerance if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)


def layer(rows: int, columns: int) -> tuple[LinearSpec, Given]:
    """Two parts with a bias; weights of a trained layer's size."""
    generator = torch.Generator().manual_seed(rows + columns)
    spec = LinearSpec(("a", "b"), columns, (rows // 3, rows - rows // 3), bias=True)
    tensors = {}
    for part, count in zip(spec.parts, spec.out_features, strict=True):
        tensors[f"{part}.weight"] = torch.randn(count, columns, generator=generator) / columns**0.5
        tensors[f"{part}.bias"] = torch.randn(count, generator=generator)
    return spec, Given(tensors)


MADE_AT_LOAD = (
    *("int8", "int8-dynamic", "bnb-int8", "nf4", "nf4-double", "fp4", "fp4-double"),
    *("int4-g32", "int4-g64-sym", "int4-g128", "int3-g32-sym", "int3-g64", "int3-g128"),
)


@pytest.mark.parametrize("name", MADE_AT_LOAD)
@pytest.mark.parametrize(("rows", "columns", "dtype"), [
    (32, 96, torch.float32), (24, 160, torch.float16),
])  # fmt: skip
def test_schemes_made_at_load(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    method = load_time_method(name)
    if name.endswith("double"):
        columns += 32  # scales in bytes need whole blocks of 64
    spec, source = layer(rows, columns)
    check(method, spec, source, dtype)


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir()))
def test_layers_of_checkpoints_that_other_tools_wrote(name: str) -> None:
    checkpoint = open_checkpoint(DATA / name)
    layers = [spec for layer in layer_specs(checkpoint.config) for spec in layer]
    scheme = choose_scheme(checkpoint, None, layers, head_spec(checkpoint.config), CPU)
    spec = layers[0]
    method = scheme.method_for(spec)
    # bitsandbytes' 4-bit weights are rounded to 16 bits on a CPU, as the tool's own are.
    tolerance = 2e-2 if name in ("bnb-fp4", "bnb-nf4-dq-qwen2") else 2e-4
    check(method, spec, scheme.source, torch.float32, (5,), tolerance)


def test_a_matrix_of_tiles_is_what_is_multiplied() -> None:
    """The processed layer holds no copy in the CPU's layout."""
    spec, source = layer(96, 192)
    for method in (Integer(4, 64, True), LoadedCodes("nf4", True)):
        weights = method.process(method.create_weights(spec, source, torch.float32, CPU))
        matrices = [piece.matrix for piece in weights.pieces] if hasattr(weights, "pieces") else []
        matrices = matrices or [weights.matrix]  # type: ignore[union-attr]
        assert all(isinstance(matrix, DeviceMatrix) for matrix in matrices)


def test_outliers_stay_precise_whatever_the_batch() -> None:
    """Few tokens bring all their digits; 70 only those that need them."""
    spec, source = layer(96, 128)
    method = LLMInt8()
    stored = method.create_weights(spec, source, torch.float32, CPU)
    weights = method.process(stored)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(3)).clamp(-4, 4)
    x[1, 17], x[40, 3] = 60.0, -40.0
    expected = method.apply(stored, x)
    exact = x @ method.dequantize(stored).T + stored.bias
    for rows in (2, 70):
        y = method.apply(weights, x[:rows])
        torch.testing.assert_close(y, expected[:rows], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(y, exact[:rows], rtol=0, atol=0.1)


def test_float8_of_one_scale_a_tensor() -> None:
    g = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=g).to(torch.float8_e4m3fn)
    source = Given({"a.weight": values, "a.weight_scale": torch.tensor([0.05])})
    check(Fp8("tensor"), LinearSpec(("a",), 96, (64,)), source, torch.float32)


def test_gguf_blocks_are_refused_by_name() -> None:
    matrix = BlockMatrix(torch.zeros(4, 144, dtype=torch.uint8), "Q4_K", 256)
    with pytest.raises(EngineError, match=r"Q4_K.*'float', 'int8' or 'int4-g32'"):
        matrix.placed()


def test_groups_that_the_kernels_do_not_read_are_refused_before_loading() -> None:
    spec = LinearSpec(("a",), 96, (64,))
    with pytest.raises(EngineError, match="groups of 48"):
        GPTQ(GPTQConfig(4, 48, False, 2, {}), 2).tensor_shapes(spec)


@pytest.mark.parametrize("name", ["gptq-4b-g32-asym-descact", "awq-g32-qwen2"])
def test_a_whole_model_has_the_logits_of_its_floats(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the Triton backend from embedding to head, against plain torch on float weights."""
    tokens = list(range(7))

    def logits(quantization: str | None) -> torch.Tensor:
        config = EngineConfig(
            str(DATA / name), dtype="float32", quantization=quantization, num_threads=1,
            kv_cache_memory_bytes=1 << 20, max_num_seqs=4, max_model_len=64,
        )  # fmt: skip
        return load_runner(config).logits(tokens)

    ours = logits(None)
    monkeypatch.setenv("HEADRACE_BACKEND", "torch")
    expected = logits("float")
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
