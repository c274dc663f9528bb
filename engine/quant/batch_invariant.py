"""Unquantized weights multiplied by the Triton kernel whose rows do not depend on the batch: for
deterministic mode on a device."""

from torch import Tensor

from headrace.engine.quant.unquantized import FloatWeights, Unquantized
from headrace.kernels.batch_invariant_matmul import batch_invariant_matmul


class BatchInvariant(Unquantized):
    def process(self, weights: FloatWeights) -> FloatWeights:
        return weights

    def apply(self, weights: FloatWeights, x: Tensor) -> Tensor:
        return batch_invariant_matmul(x.to(weights.weight.dtype), weights.weight, weights.bias)
