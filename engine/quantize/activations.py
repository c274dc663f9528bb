"""What a layer's inputs look like over the calibration tokens, summed up batch by batch."""

import torch
from torch import Tensor

from headrace.engine.errors import EngineError


class Moments:
    """Sum of x x' (float64 [in, in]) and of |x| (float64 [in]) over the rows seen."""

    def __init__(self, columns: int) -> None:
        self._products = torch.zeros(columns, columns, dtype=torch.float64)
        self._magnitudes = torch.zeros(columns, dtype=torch.float64)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """`rows` float32 [tokens, in]."""
        self._products += rows.T @ rows
        self._magnitudes += rows.abs().sum(0)
        self.count += len(rows)

    def hessian(self) -> Tensor:
        """Mean of x x', float32 [in, in]. Raises EngineError where activations are not finite."""
        mean = (self._products / max(self.count, 1)).float()
        if not bool(mean.isfinite().all()):
            raise EngineError(
                "activations are not finite: the model overflows on the calibration text"
            )
        return mean

    def magnitudes(self) -> Tensor:
        """Mean of |x|, float32 [in]."""
        return (self._magnitudes / max(self.count, 1)).float()
