"""The whole job: read a model, quantize it layer by layer, write it.

One layer's floats are in memory at a time, beside the embedding and the texts' states before that
layer: the model need not fit. Nothing is random, and texts pass finished layers as these were
written: a run that was interrupted writes the same bytes as one that was not.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.engine.errors import CheckpointError, EngineError
from headrace.engine.loading.checkpoint import TensorSource
from headrace.engine.quant.method import LinearSpec
from headrace.engine.quantize import formats
from headrace.engine.quantize.block import LayerFloats, Texts, load_layer, norm_names
from headrace.engine.quantize.calibration import (
    TextTokens,
    calibration_tokens,
    evaluation_tokens,
)
from headrace.engine.quantize.export import write_metadata
from headrace.engine.quantize.layerwise import LayerQuantizer
from headrace.engine.quantize.perplexity import Perplexity
from headrace.engine.quantize.recipe import Recipe
from headrace.engine.quantize.report import PerplexityReport, Report
from headrace.engine.quantize.source import EMBEDDING, FINAL_NORM, Source
from headrace.engine.quantize.work import StoredLayer, WorkFolder, check_space, write_model
from headrace.engine.tokenizer import load_tokenizer

SAMPLES, SEQUENCE_LENGTH = 64, 512

OnLayer = Callable[[int, int, float], None]
"""Called after each layer: layers done, of how many, its mean error."""


@dataclass(frozen=True, slots=True)
class TextOptions:
    """`calibration` None: the default text. `evaluation`: the text to report perplexity on."""

    calibration: Path | None = None
    evaluation: Path | None = None
    samples: int = SAMPLES
    sequence_length: int = SEQUENCE_LENGTH


@torch.inference_mode()
def quantize_model(
    source: Source,
    recipe: Recipe,
    output: Path,
    texts: TextOptions,
    *,
    restart: bool = False,
    on_layer: OnLayer | None = None,
) -> Report:
    """Write the quantized model to `output`, which must not exist. Raises EngineError."""
    calibration, evaluation = _read_texts(source, recipe, texts)
    reader = formats.reader(recipe)
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in source.linears:
        shapes.update(reader.tensor_shapes(spec))
    linear = formats.stored_bytes(recipe, shapes)
    others = sum(2 * _count(source.tensors.shapes()[name]) for name in source.global_names())
    work = WorkFolder(output)
    identity = {
        "model": source.checkpoint.fingerprint,
        "recipe": recipe.values(),
        "calibration": calibration.digest if calibration else None,
        "evaluation": evaluation.digest if evaluation else None,
        "torch": torch.__version__,
    }
    try:
        with work.opened(identity, restart):
            check_space(work.path, 2 * linear + others)
            job = _Job(source, recipe, work, calibration, evaluation)
            return job.run(on_layer, linear)
    except OSError as error:
        raise EngineError(
            f"writing failed ({error.strerror or error}): {work.path} keeps the finished layers;"
            " run the same command again when that is mended"
        ) from error


class _Job:
    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        work: WorkFolder,
        calibration: TextTokens | None,
        evaluation: TextTokens | None,
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._work = work
        self._calibration = calibration
        self._evaluation = evaluation
        self._reader = formats.reader(recipe)
        embedding = source.tensors.load(EMBEDDING)
        self._texts: Texts | None = None
        if calibration is not None:
            self._texts = Texts(source.config, calibration.sequences)
            self._texts.embed(source.narrowed(EMBEDDING, embedding))
        self._before = self._after = None
        if evaluation is not None:
            given = source.config, evaluation.sequences
            self._before = Perplexity(*given, embedding)
            self._after = Perplexity(*given, source.narrowed(EMBEDDING, embedding))
        self._quantizer = LayerQuantizer(
            source.config,
            recipe,
            formats.grid_spec(recipe, source.dtype),
            source.dtype,
            self._texts,
        )

    def run(self, on_layer: OnLayer | None, linear: int) -> Report:
        begun, stored, earlier, resumed = time.monotonic(), [], 0.0, 0
        count = self._source.config.num_layers
        for index in range(count):
            found = self._work.layer(index)
            if found is None:
                found = self._quantize(index)
            else:
                earlier += found.seconds
                resumed += 1
                if self._before is not None:
                    self._before.advance(self._load(index))
            self._advance(index, found)
            stored.append(found)
            if on_layer is not None:
                errors = [report.error for report in found.reports]
                on_layer(index + 1, count, sum(errors) / len(errors))
        return self._write(stored, linear, earlier, resumed, begun)

    def _load(self, index: int) -> LayerFloats:
        return load_layer(self._source.config, self._source.tensors, index)

    def _quantize(self, index: int) -> StoredLayer:
        begun = time.monotonic()
        layer = self._load(index)
        if self._before is not None:
            self._before.advance(layer)
        made = self._quantizer.quantize(layer)
        tensors = {}
        for part, matrix in made.matrices.items():
            tensors.update(formats.tensors_of(part, matrix, self._recipe))
        names = norm_names(self._source.config, index)
        norms = [layer.input_norm, layer.post_norm]
        if layer.head_norms is not None:
            norms += [layer.head_norms.query, layer.head_norms.key]
        floats = dict(zip(names, norms, strict=True))
        floats.update({f"{part}.bias": bias for part, bias in layer.biases.items()})
        for name, tensor in floats.items():
            tensors[name] = self._source.narrowed(name, tensor)
        return self._work.save_layer(index, tensors, made.reports, time.monotonic() - begun)

    def _advance(self, index: int, stored: StoredLayer) -> None:
        """Bring the texts past the layer as it was written."""
        if self._texts is None and self._after is None:
            return
        layer = load_layer(
            self._source.config, _Written(stored.source, self._source.layers[index], self), index
        )
        if self._texts is not None:
            self._texts.advance(layer, self._source.config)
        if self._after is not None:
            self._after.advance(layer)

    def dequantized(self, spec: LinearSpec, source: TensorSource) -> Tensor:
        weights = self._reader.create_weights(spec, source, torch.float32, torch.device("cpu"))
        return self._reader.dequantize(weights)

    def _write(
        self,
        stored: list[StoredLayer],
        linear: int,
        earlier: float,
        resumed: int,
        begun: float,
    ) -> Report:
        source = self._source
        perplexity = None
        if self._before is not None and self._after is not None and self._evaluation is not None:
            norm, head = source.tensors.load(FINAL_NORM), source.head()
            perplexity = PerplexityReport(
                self._evaluation.name,
                self._evaluation.num_tokens,
                self._before.result(norm.float(), head.float()),
                self._after.result(
                    source.stored(FINAL_NORM).float(),
                    source.narrowed(source.global_names()[-1], head).float(),
                ),
            )
        shapes = source.tensors.shapes()
        header = {name: (source.dtype, tuple(shapes[name])) for name in source.global_names()}
        for layer in stored:
            header.update(layer.header)
        with self._work.finished() as folder:
            total = write_model(folder, header, self._tensors(stored))
            write_metadata(
                folder,
                source.path,
                formats.quantization_config(self._recipe),
                str(source.dtype).removeprefix("torch."),
            )
            linear_values = sum(
                spec.in_features * sum(spec.out_features) for spec in source.linears
            )
            report = Report(
                model=source.checkpoint.name,
                recipe=self._recipe.values(),
                calibration=_calibration_values(self._calibration),
                parts=[report for layer in stored for report in layer.reports],
                bytes_source=2 * sum(map(_count, shapes.values())),
                bytes_linear_before=2 * linear_values,
                bytes_linear=linear,
                bytes_total=total,
                seconds=round(earlier + time.monotonic() - begun, 1),
                resumed_layers=resumed,
                peak_memory_bytes=_peak_memory(),
                perplexity=perplexity,
            )
            report.write(folder)
        return report

    def _tensors(self, stored: list[StoredLayer]) -> Iterator[Tensor]:
        for name in self._source.global_names():
            yield self._source.stored(name)
        for layer in stored:
            for name in layer.header:
                yield layer.source.load(name)


class _Written:
    """A finished layer's file as floats."""

    def __init__(self, tensors: TensorSource, specs: tuple[LinearSpec, ...], job: _Job) -> None:
        self._tensors = tensors
        self._job = job
        self._parts = {
            f"{part}.weight": LinearSpec((part,), spec.in_features, (rows,))
            for spec in specs
            for part, rows in zip(spec.parts, spec.out_features, strict=True)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._tensors.shapes())

    def load(self, name: str) -> Tensor:
        spec = self._parts.get(name)
        return (
            self._tensors.load(name) if spec is None else self._job.dequantized(spec, self._tensors)
        )


def _read_texts(
    source: Source, recipe: Recipe, texts: TextOptions
) -> tuple[TextTokens | None, TextTokens | None]:
    if not recipe.calibrated and texts.calibration is not None:
        raise EngineError("rtn takes no calibration text: leave --calibration out")
    if not recipe.calibrated and texts.evaluation is None:
        return None, None
    longest = source.config.max_position_embeddings
    if not 2 <= texts.sequence_length <= longest:
        raise EngineError(
            f"--sequence-length {texts.sequence_length} is not between 2 and the model's {longest}"
        )
    tokenizer = load_tokenizer(source.path)
    calibration = evaluation = None
    if recipe.calibrated:
        calibration = calibration_tokens(
            texts.calibration, tokenizer, texts.samples, texts.sequence_length
        )
    if texts.evaluation is not None:
        evaluation = evaluation_tokens(
            texts.evaluation, tokenizer, texts.sequence_length, calibration
        )
    for found in (calibration, evaluation):
        if found is not None:
            highest = max(max(tokens) for tokens in found.sequences)
            if highest >= source.config.vocab_size:
                raise CheckpointError(
                    f"{source.checkpoint.name}: its tokenizer gives id {highest}, beyond the"
                    f" embedding's {source.config.vocab_size}"
                )
    return calibration, evaluation


def _calibration_values(found: TextTokens | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "text": found.name,
        "sequences": len(found.sequences),
        "tokens": found.num_tokens,
        "available_tokens": found.available,
    }


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
