"""matplotlib, loaded only when something is drawn. Without it a run goes on and says so."""

from pathlib import Path
from typing import Any

import click


def subplots(rows: int, columns: int, inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=inches)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw(plot: Any, summary: Any, path: Path) -> None:
    """`plot(summary, path)`, or one line on stderr when matplotlib is missing."""
    try:
        plot(summary, path)
    except ImportError:
        click.echo("no plot: pip install 'headrace[plot]'", err=True)
    else:
        click.echo(f"{path}", err=True)
