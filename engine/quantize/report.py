"""What a run found: as JSON beside the model, and as text."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.engine.quantize.layerwise import PartReport

FILE = "quantization_report.json"


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    text: str
    tokens: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Report:
    """Sizes in bytes: `source` of all weights as 16-bit floats, `linear` of the quantized layers
    (`linear_before` in 16 bits), `total` of the written tensors. `seconds`: of all runs that it
    took; `resumed_layers`: those that an earlier run had finished."""

    model: str
    recipe: dict[str, Any]
    calibration: dict[str, Any] | None
    parts: list[PartReport]
    bytes_source: int
    bytes_linear_before: int
    bytes_linear: int
    bytes_total: int
    seconds: float
    resumed_layers: int
    peak_memory_bytes: int
    perplexity: PerplexityReport | None

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(self.values(), indent=1) + "\n")

    def text(self) -> str:
        """A table of the kinds of layers, the worst single ones, sizes and perplexity."""
        lines = [f"{'layer':12} {'error':>9} {'rtn':>9}  (share of the output's square, mean)"]
        kinds: dict[str, list[PartReport]] = {}
        for part in self.parts:
            kinds.setdefault(part.part.rpartition(".")[2], []).append(part)
        for kind, parts in kinds.items():
            error = sum(part.error for part in parts) / len(parts)
            nearest = sum(part.nearest_error for part in parts) / len(parts)
            lines.append(f"{kind:12} {error:9.5f} {nearest:9.5f}")
        worst = sorted(self.parts, key=lambda part: -part.error)[:3]
        lines.append("worst: " + ", ".join(f"{part.part} {part.error:.4f}" for part in worst))
        lines.append(
            f"linear layers {self.bytes_linear_before / 1e6:.1f} -> {self.bytes_linear / 1e6:.1f}"
            f" MB; whole model {self.bytes_source / 1e6:.1f} (16 bits) ->"
            f" {self.bytes_total / 1e6:.1f} MB"
        )
        if self.perplexity is not None:
            found = self.perplexity
            lines.append(
                f"perplexity on {found.text} ({found.tokens} tokens): {found.before:.3f} ->"
                f" {found.after:.3f}"
            )
        lines.append(
            f"{self.seconds:.0f} s, at most {self.peak_memory_bytes / 1e9:.2f} GB of memory"
            + (f"; {self.resumed_layers} layers were there" if self.resumed_layers else "")
        )
        return "\n".join(lines)
