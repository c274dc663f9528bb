"""One item's results on disk: rewritten whenever a figure is added, so a cut run keeps the rest."""

import json
import time
from pathlib import Path
from typing import Any


class Record:
    """`rows`: {"what", "value", "unit"} and, where there is one, "target" (in the same unit),
    "met", and further figures by name. `judged` False: a rehearsal, which meets no target."""

    def __init__(self, path: Path, item: str, judged: bool = True) -> None:
        self._path = path
        self._judged = judged
        self._started = time.perf_counter()
        self._content: dict[str, Any] = {"item": item, "status": "running", "rows": []}
        self._write()

    def note(self, **facts: object) -> None:
        """Facts about the whole item."""
        self._content.update(facts)
        self._write()

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
        **figures: object,
    ) -> None:
        row: dict[str, Any] = {"what": what, "value": value, "unit": unit, **figures}
        if at_most is not None:
            row["target"] = f"<= {at_most:g}"
        if at_least is not None:
            row["target"] = f">= {at_least:g}"
        if self._judged and "target" in row:
            met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
            row["met"] = met
        self._content["rows"].append(row)
        self._write()

    def end(self, status: str, **facts: object) -> None:
        """`status`: done, failed, or not run."""
        self.note(status=status, **facts)

    def _write(self) -> None:
        self._content["seconds"] = round(time.perf_counter() - self._started, 2)
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text(json.dumps(self._content, indent=1))
        temporary.replace(self._path)
