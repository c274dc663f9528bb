"""A test run that takes an hour: its cases in a mixed order, so that a run that is cut has seen
some of all, and its progress as lines of a log, one a minute in the place of a dot a case; at the
end, how many cases of each file ended how."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest

_EVERY = 60.0


class FullRun:
    """A plugin; `config.pluginmanager.register` takes it."""

    def __init__(self, config: pytest.Config) -> None:
        self._out = config.get_terminal_writer()
        self._total = 0
        self._outcomes: dict[str, Counter[str]] = {}
        self._seconds: dict[str, float] = {}
        self._started = self._said = time.monotonic()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        random.Random(0).shuffle(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)
        self._say(f"{self._total:,} cases")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("passed", "", "") if report.when == "call" and report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = Path(report.location[0]).name
        self._seconds[file] = self._seconds.get(file, 0.0) + report.duration
        if report.when == "call" or not report.passed:
            self._outcomes.setdefault(file, Counter())[report.outcome] += 1
        if time.monotonic() - self._said >= _EVERY:
            done = sum(outcomes.total() for outcomes in self._outcomes.values())
            self._say(
                f"{done:,} of {self._total:,} cases ({done / self._total:.0%}),"
                f" {self._count('failed')} failed"
            )

    def pytest_terminal_summary(self) -> None:
        for file, outcomes in sorted(self._outcomes.items()):
            ended = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
            self._say(f"{file}: {ended}, {self._seconds[file] / 60:.1f} min")
        self._say(
            f"done: {self._count('passed'):,} of {self._total:,} cases passed,"
            f" {self._count('failed')} failed, {self._count('skipped')} skipped,"
            f" in {(time.monotonic() - self._started) / 60:.0f} min"
        )

    def _count(self, outcome: str) -> int:
        return sum(outcomes[outcome] for outcomes in self._outcomes.values())

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        self._out.line(f"{time.strftime('%H:%M:%S')} {line}")
        self._out.flush()
