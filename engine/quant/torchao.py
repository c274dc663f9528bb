"""torchao's INT8 weight-only tensors: `_weight_qdata` int8 [out, in], `_weight_scale` [out, 1]."""

from collections.abc import Mapping

import torch

from headrace.engine.errors import CheckpointError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.int8 import Int8, Int8Weights, int8_matrix
from headrace.engine.quant.method import LinearSpec, bias_shapes, stacked_bias


class TorchaoInt8(Int8):
    def tensor_shapes(self, spec: LinearSpec) -> Mapping[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = bias_shapes(spec)
        for part, rows in zip(spec.parts, spec.out_features, strict=True):
            shapes[f"{part}._weight_qdata"] = (rows, spec.in_features)
            shapes[f"{part}._weight_scale"] = (rows, 1)
            shapes[f"{part}._weight_zero_point"] = (rows, 1)
        return shapes

    def create_weights(
        self, spec: LinearSpec, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Int8Weights:
        for part in spec.parts:
            if source.load(f"{part}._weight_zero_point").any():
                raise CheckpointError(f"{part}: torchao INT8 with zero points is not supported")
        values = torch.cat([source.load(f"{part}._weight_qdata") for part in spec.parts])
        scales = torch.cat([source.load(f"{part}._weight_scale")[:, 0] for part in spec.parts])
        bias = stacked_bias(spec, source, torch.float32, device)
        return Int8Weights(int8_matrix(values, scales.float()), bias)
