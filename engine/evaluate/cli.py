"""`headrace verify`: is a compressed model still good enough for these questions?"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from headrace.engine.config import EngineConfig
from headrace.engine.errors import EngineError
from headrace.engine.evaluate import questions as question_files
from headrace.engine.evaluate import report
from headrace.engine.evaluate import text as texts
from headrace.engine.evaluate.errors import EvaluateError
from headrace.engine.evaluate.run import Tried, Work, evaluate
from headrace.engine.evaluate.variant import Variant
from headrace.engine.evaluate.verdict import Limits

_LIMITS = Limits()
_SHARE = click.FloatRange(0.0, 1.0)
_DTYPES = click.Choice(["auto", "float32", "bfloat16", "float16"])
_KV = click.Choice(["auto", "float", "int8", "fp8"])


@click.command("verify", context_settings={"auto_envvar_prefix": "HEADRACE_VERIFY"})
@click.argument("model")
@click.option(
    "--against",
    metavar="MODEL",
    help="The model that sets the standard; default: MODEL itself, its weights as floats.",
)
@click.option("--quantization", help="How MODEL's weights are held: int8-dynamic, int4-g64, ...")
@click.option("--against-quantization", help="The same of --against; a float type too: bf16.")
@click.option("--dtype", type=_DTYPES, default="auto", show_default=True)
@click.option("--against-dtype", type=_DTYPES, default="auto", show_default=True)
@click.option("--kv-cache-dtype", type=_KV, default="auto", show_default=True)
@click.option("--against-kv-cache-dtype", type=_KV, default="auto", show_default=True)
@click.option(
    "--fallback",
    metavar="NAME,...",
    help="Quantizations of MODEL (or other models' folders) in order, e.g. int4-g64,int8,bf16: "
    "prints the first that holds.",
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL of your own; default: 50 questions that come with Headrace.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Text for perplexity and KL divergence; default: one that comes with Headrace.",
)
@click.option(
    "--text-tokens",
    type=click.IntRange(0),
    default=1024,
    show_default=True,
    help="0: read no text.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Length of answers to questions that set none.",
)
@click.option(
    "--max-drop",
    type=_SHARE,
    default=_LIMITS.drop,
    show_default=True,
    help="Loss of accuracy that is accepted: 0.05 is 5 points.",
)
@click.option(
    "--confident",
    is_flag=True,
    help="The whole confidence interval must lie within --max-drop: takes hundreds of questions.",
)
@click.option(
    "--significance",
    type=click.FloatRange(0.0, 0.5, min_open=True),
    default=_LIMITS.significance,
    show_default=True,
    help="A loss with a smaller p-value fails; intervals are of 1 minus it.",
)
@click.option("--min-accuracy", type=_SHARE, help="Share of right answers needed in any case.")
@click.option("--max-json-drop", type=_SHARE, default=_LIMITS.json_drop, show_default=True)
@click.option(
    "--max-perplexity-increase",
    type=click.FloatRange(0.0),
    default=_LIMITS.perplexity,
    show_default=True,
    help="0.1: a tenth more.",
)
@click.option("--max-kl", type=click.FloatRange(0.0), help="Mean KL divergence in nats.")
@click.option("--min-agreement", type=_SHARE, help="Share of the text with the same first token.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for verify.json and verify.md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of Markdown.")
@click.option("--max-num-seqs", type=click.IntRange(1, 2**16), default=32, show_default=True)
@click.option("--max-model-len", type=click.IntRange(2), help="Prompt and answer.")
@click.option("--kv-cache-memory", metavar="SIZE", help="KV pool of each model: 2G, 500M.")
@click.option("--num-threads", type=click.IntRange(1, 1024), help="CPU threads.")
@click.pass_context
def verify(ctx: click.Context, /, model: str, **chosen: Any) -> None:
    """Put the same questions to MODEL and to the one it replaces, and say what was lost.

    Exit status: 0 holds, 1 does not hold, 2 bad input.
    """
    try:
        tried, name = _verify(model, chosen)
    except EngineError as error:
        click.echo(f"Error: {error}", err=True)
        ctx.exit(2)
    if chosen["as_json"]:
        click.echo(json.dumps(report.document(tried, name), indent=1, ensure_ascii=False))
    elif chosen["fallback"]:
        if name is None:
            click.echo("none of them holds", err=True)
        else:
            click.echo(name)
    else:
        click.echo(report.markdown(tried), nl=False)
    ctx.exit(0 if name is not None else 1)


def _verify(model: str, chosen: dict[str, Any]) -> tuple[list[Tried], str | None]:
    """All that were tried, and the name of the one that holds."""
    work = _work(chosen)
    names, candidates = _candidates(model, chosen)
    reference = _reference(model, chosen)
    if reference in candidates and len(candidates) == 1:
        raise EvaluateError(
            "both sides are the same; give --quantization, --fallback, --kv-cache-dtype or"
            " another model --against"
        )
    out = chosen["out"]
    if out is not None:
        _make(out)
    tried: list[Tried] = []
    with _Bar(len(work.questions)) as bar:
        for one in evaluate(reference, candidates, work, bar.update):
            tried.append(one)
            bar.next(report.summary(one) if chosen["fallback"] else "")
    if chosen["fallback"] is None and tried[0].failure is not None:
        raise EvaluateError(tried[0].failure)
    name = names[len(tried) - 1] if tried[-1].holds else None
    if out is not None:
        document = json.dumps(report.document(tried, name), indent=1, ensure_ascii=False)
        _write(out / "verify.json", document + "\n")
        _write(out / "verify.md", report.markdown(tried))
        click.echo(f"{out / 'verify.json'}, {out / 'verify.md'}", err=True)
    return tried, name


def _candidates(model: str, chosen: dict[str, Any]) -> tuple[list[str], list[Variant]]:
    types = chosen["dtype"], chosen["kv_cache_dtype"]
    if chosen["fallback"] is None:
        quantization = chosen["quantization"]
        return [quantization or model], [Variant.read(model, quantization, *types)]
    if chosen["quantization"] is not None:
        raise EvaluateError("--quantization and --fallback name two candidates; give one of them")
    names = [name.strip() for name in chosen["fallback"].split(",") if name.strip()]
    if not names:
        raise EvaluateError("--fallback names nothing; write it as int4-g64,int8,bf16")
    return names, [
        Variant.read(name, None, *types)
        if "/" in name or name.endswith(".gguf")
        else Variant.read(model, name, *types)
        for name in names
    ]


def _reference(model: str, chosen: dict[str, Any]) -> Variant:
    quantization = chosen["against_quantization"]
    if chosen["against"] is None and quantization is None:
        quantization = "float"
    return Variant.read(
        chosen["against"] or model,
        *(quantization, chosen["against_dtype"], chosen["against_kv_cache_dtype"]),
    )


def _work(chosen: dict[str, Any]) -> Work:
    path = chosen["questions"] or question_files.DEFAULT
    text = None
    if chosen["text_tokens"]:
        text = texts.read_text(chosen["text"] or texts.DEFAULT)
    return Work(
        questions=question_files.load_questions(path, chosen["max_tokens"]),
        text=text,
        text_tokens=chosen["text_tokens"],
        machine=EngineConfig(
            model="",
            max_num_seqs=chosen["max_num_seqs"],
            max_model_len=chosen["max_model_len"],
            kv_cache_memory_bytes=_size(chosen["kv_cache_memory"]),
            num_threads=chosen["num_threads"],
        ),
        limits=Limits(
            drop=chosen["max_drop"],
            confident=chosen["confident"],
            significance=chosen["significance"],
            accuracy=chosen["min_accuracy"],
            json_drop=chosen["max_json_drop"],
            perplexity=chosen["max_perplexity_increase"],
            kl=chosen["max_kl"],
            agreement=chosen["min_agreement"],
        ),
    )


def _size(text: str | None) -> int | None:
    from headrace.engine.planner.errors import PlanError
    from headrace.engine.planner.units import parse_size

    try:
        return None if text is None else parse_size(text)
    except PlanError as error:
        raise EvaluateError(f"--kv-cache-memory: {error}") from error


class _Bar:
    """Questions answered, on stderr; nothing where stderr is no terminal."""

    def __init__(self, per_model: int) -> None:
        self._bar = tqdm(unit="answer", total=0, disable=not sys.stderr.isatty(), leave=False)
        self._per_model = per_model
        self._model = ""
        self._done = 0

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, what: str, done: int, total: int) -> None:
        model = what.removesuffix(": text")
        if model != self._model:
            self._model, self._done = model, 0
            self._bar.total = (self._bar.total or 0) + self._per_model
        self._bar.set_description(what, refresh=False)
        self._bar.update(done - self._done)
        self._done = done

    def next(self, line: str) -> None:
        """A candidate has ended; another may follow."""
        if line:
            self._bar.write(line, file=sys.stderr)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Found out before the questions, not after them.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EvaluateError(f"--out {folder} cannot be written to: {error.strerror}") from error


def _write(path: Path, content: str) -> None:
    """To a temporary name first, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise EvaluateError(f"{path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    verify()
