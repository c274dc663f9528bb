"""`headrace quantize`: a smaller checkpoint of a model, resumable, with a report."""

import json
import sys
from pathlib import Path

import click
import torch
from tqdm import tqdm

from headrace.engine.errors import EngineError
from headrace.engine.machine import available_threads
from headrace.engine.quantize.recipe import BITS, make_recipe
from headrace.engine.quantize.report import FILE
from headrace.engine.quantize.run import (
    SAMPLES,
    SEQUENCE_LENGTH,
    TextOptions,
    quantize_model,
)
from headrace.engine.quantize.source import Source


class _Refusal(click.ClickException):
    exit_code = 2


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_QUANTIZE"})
@click.argument("model")
@click.option("--to", required=True, metavar="|".join(BITS), help="Bits of the linear layers.")
@click.option(
    "--method",
    default="gptq",
    show_default=True,
    metavar="gptq|awq|rtn",
    help="How values are rounded; rtn (to nearest) needs no calibration text.",
)
@click.option(
    "--format",
    "form",
    default="auto",
    show_default=True,
    metavar="auto|gptq|awq|compressed-tensors",
    help="File format; auto: the method's own, and INT8 weights and activations for int8.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Text (or .jsonl with text, prompt or messages) like what the model will read; default: a"
    " text that comes with Headrace.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=SAMPLES,
    show_default=True,
    help="Sequences of calibration text, at most.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(min=2),
    default=SEQUENCE_LENGTH,
    show_default=True,
    help="Tokens of a sequence.",
)
@click.option(
    "--group-size",
    type=int,
    help="Columns that share a scale, -1: all; default: the largest of 128, 64, 32 that divides.",
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help="Without or with zero points; default: without, except for awq.",
)
@click.option(
    "--order",
    default="groups",
    show_default=True,
    metavar="groups|columns|none",
    help="GPTQ: what is rounded first. groups: the most active groups and columns in them; columns:"
    " the most active columns (act-order; files get desc_act).",
)
@click.option(
    "--static-groups", is_flag=True, help="GPTQ: fix all scales beforehand; no desc_act then."
)
@click.option("--damping", type=float, default=0.01, show_default=True, help="GPTQ's.")
@click.option(
    "--clip/--no-clip", default=True, show_default=True, help="Search for narrower ranges."
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Text to report perplexity on, before and after; not the calibration text.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder to write; default: the model's name and what was made, here.",
)
@click.option("--restart", is_flag=True, help="Forget what an interrupted run has finished.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Default: the CPUs at hand.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def quantize(
    model: str,
    to: str,
    method: str,
    form: str,
    calibration: Path | None,
    samples: int,
    sequence_length: int,
    group_size: int | None,
    symmetric: bool | None,
    order: str,
    static_groups: bool,
    damping: float,
    clip: bool,
    text: Path | None,
    output: Path | None,
    restart: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Write a quantized checkpoint of MODEL (a folder, a GGUF file, a hub id) that Transformers,
    vLLM and Headrace load.

    Only the linear layers are quantized; embeddings, head and norms stay in 16 bits. Layers are
    done one by one: an interrupted run goes on when the same command is given again.
    """
    torch.set_num_threads(threads or available_threads())
    try:
        source = Source(model)
        recipe = make_recipe(
            to,
            source.linears,
            method=method,
            format=form,
            group=group_size,
            symmetric=symmetric,
            order=order,
            static_groups=static_groups,
            damping=damping,
            clip=clip,
        )
        target = output or Path(f"{source.checkpoint.name}-{recipe.label}")
        texts = TextOptions(calibration, text, samples, sequence_length)
        with tqdm(total=source.config.num_layers, unit="layer", file=sys.stderr) as bar:

            def on_layer(done: int, count: int, error: float) -> None:
                bar.set_postfix_str(f"error {error:.5f}", refresh=False)
                bar.update(done - bar.n)

            report = quantize_model(
                source, recipe, target, texts, restart=restart, on_layer=on_layer
            )
    except EngineError as error:
        raise _Refusal(str(error)) from error
    except KeyboardInterrupt:
        click.echo("interrupted: the same command goes on where it stopped", err=True)
        raise
    if as_json:
        click.echo(json.dumps({"output": str(target), **report.values()}))
        return
    click.echo(report.text())
    click.echo(f"written: {target} (report: {target / FILE})")
