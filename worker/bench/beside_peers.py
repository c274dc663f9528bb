"""`headrace bench --peers`: other engines beside ours on the same weights and token ids, in turn.

Each peer runs in an environment of its own (`peers.install`) and in the form of the model that it
reads. What can't be installed, or has no such form, is a row that says so. The reference that
outputs are counted against is our engine in float32, which the golden tests hold to Transformers'.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from headrace.worker.bench import report, side_by_side, workloads
from headrace.worker.bench.compare import Row, System, compare
from headrace.worker.bench.peers.install import (
    NotInstalled,
    Peer,
    cache_folder,
    install,
    is_installed,
    preloads,
    python_of,
)
from headrace.worker.bench.peers.weights import as_folder, as_gguf, as_int8_folder
from headrace.worker.bench.subject import Subject

REFERENCE = System.module("headrace engine", "headrace_engine", "float32")
OTHERS_NAMES = {"int8-dynamic": "int8"}


def peer_systems(
    peers: Sequence[Peer], subject: Subject, *, install_missing: bool = True
) -> list[System]:
    """One system a peer and dtype that both it and the subject name."""
    cache = cache_folder()
    found = []
    for peer in peers:
        missing = _make(peer, cache, install_missing)
        named = [OTHERS_NAMES.get(dtype, dtype) for dtype in subject.dtypes]
        dtypes = [dtype for dtype in named if dtype in peer.dtypes]
        for dtype in dtypes or peer.dtypes[:1]:
            libraries = preloads(peer, cache)
            env = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
            settings = dict(peer.settings)
            if libraries:
                env["LD_PRELOAD"] = ":".join(libraries)
                settings["preloaded"] = "+".join(Path(name).name for name in libraries)
            model, reason = (None, missing) if missing else _model(peer, subject, dtype, cache)
            found.append(
                System(
                    peer.title,
                    dtype,
                    (str(python_of(peer, cache)), "-m", _module(peer)),
                    settings,
                    env,
                    model=model,
                    missing=reason,
                )
            )
    return found


def run(
    subject: Subject, peers: Sequence[Peer], repeats: int, out: Path, *, install: bool = True
) -> list[dict[str, Any]]:
    """One row a system, dtype and workload, in the form of peers.json."""
    ours = []
    for dtype in subject.dtypes:
        found = side_by_side.systems(dtype, subject.options)
        ours += [system for system in found if system.name.startswith("headrace")]
    others = peer_systems(peers, subject, install_missing=install)
    rows: list[dict[str, Any]] = []
    for name, requests in subject.work.items():
        path = out / f"{name}.jsonl"
        workloads.write(list(requests), path)
        systems = [*ours, *others]
        if not any(s.name == REFERENCE.name and s.dtype == REFERENCE.dtype for s in ours):
            systems.insert(0, REFERENCE)
        measured = compare(
            systems,
            model=str(subject.path),
            workload=name,
            workload_path=path,
            threads=subject.threads,
            repeats=repeats,
        )
        reference = next(
            row for row in measured if row.system == REFERENCE.name and row.dtype == REFERENCE.dtype
        )
        rows += [
            peer_row(row, system, reference, subject.threads)
            for row, system in zip(measured, systems, strict=True)
        ]
    return rows


def peer_row(row: Row, system: System, reference: Row, threads: int) -> dict[str, Any]:
    """`exact_of_64`: outputs equal to the float32 reference's, of however many there are."""
    summary = row.summary(reference)
    exact = summary["exact"] if row.times_s else None
    return {
        "system": row.system,
        "workload": row.workload,
        "dtype": row.dtype,
        "median_s": summary["median_s"],
        "times_s": row.times_s,
        "output_tokens": row.output_tokens,
        "peak_rss_bytes": row.peak_rss_bytes,
        "exact_of_64": exact,
        "requests": len(reference.token_ids),
        "version": row.version,
        "settings": system.settings,
        "threads": threads,
        "load_s": row.load_s,
        "error": row.error or None,
    }


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row; what was not run stays in it with its reason."""
    lines = []
    for row in rows:
        cells = [row["system"], row["dtype"], row["workload"]]
        if row["error"] or row["median_s"] is None:
            lines.append([*cells, f"not run: {row['error']}", "", "", "", ""])
            continue
        rate = row["output_tokens"] / row["median_s"]
        exact = "" if row["exact_of_64"] is None else f"{row['exact_of_64']}/{row['requests']}"
        memory = f"{row['peak_rss_bytes'] / 2**30:.2f}"
        median = f"{row['median_s']:.2f} ({len(row['times_s'])})"
        lines.append([*cells, median, report.figure(rate), exact, memory, row["version"]])
    head = ["system", "dtype", "workload", "median s (n)", "output tok/s", "equal to float32"]
    table = report.markdown([*head, "peak RSS GiB", "version"], lines)
    return "\n".join((table, "", *_settings(rows)))


def _settings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each system was told, one line each."""
    told = {}
    for row in rows:
        chosen = ", ".join(f"{name} {value}" for name, value in row["settings"].items())
        told[row["system"]] = f"{row['threads']} threads" + (f", {chosen}" if chosen else "")
    return [f"- {system}: {text}" for system, text in told.items()]


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """PNG: output tokens a second, a panel for each workload."""
    from headrace.worker.bench.plots import save_figure, subplots

    names = list(dict.fromkeys(row["workload"] for row in rows))
    picture, axes = subplots(1, len(names), (7 * len(names), 0.5 * len(rows) + 2))
    for axis, name in zip([axes] if len(names) == 1 else axes, names, strict=True):
        shown = [row for row in rows if row["workload"] == name and row["median_s"]]
        labels = [f"{row['system']} {row['dtype']}" for row in shown]
        axis.barh(labels, [row["output_tokens"] / row["median_s"] for row in shown])
        axis.invert_yaxis()
        axis.set(title=name, xlabel="output tokens/s")
    save_figure(picture, path)


def _make(peer: Peer, cache: Path, install_missing: bool) -> str:
    """Why the peer can't run; empty when it can."""
    if not install_missing:
        return "" if is_installed(peer, cache) else "not installed (make bench-peers does)"
    if not is_installed(peer, cache):
        click.echo(f"  installing {peer.title}", err=True)
    try:
        install(peer, cache)
    except (NotInstalled, OSError, subprocess.TimeoutExpired) as error:
        return f"could not be installed: {error}"
    return ""


def _model(peer: Peer, subject: Subject, dtype: str, cache: Path) -> tuple[str | None, str]:
    """The model's path for the peer, and why there is none."""
    made = cache / "models"
    try:
        form = peer.int8_model or peer.model if dtype == "int8" else peer.model
        if form == "compressed-tensors":
            return str(as_int8_folder(subject.path, made)), ""
        if form == "folder":
            return str(as_folder(subject.path, "float32" if dtype == "int8" else dtype, made)), ""
        if subject.path.is_dir():
            return None, "reads GGUF files only, and the model is a folder"
        return str(as_gguf(subject.path, "Q8_0" if dtype == "int8" else "BF16", made)), ""
    except Exception as error:  # Whatever the converters raise, the other rows are wanted.
        return None, f"the model could not be converted: {error}"


def _module(peer: Peer) -> str:
    return f"headrace.worker.bench.peers.{peer.module}"
