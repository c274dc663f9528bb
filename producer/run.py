"""`headrace run`: a file of prompts through a queue and a worker, in one command.

Puts together scan, ledger and session; decides nothing about a single line.
"""

import contextlib
import os
from pathlib import Path

from headrace.producer.bulk.errors import UnusableInput, UnusableOutput
from headrace.producer.bulk.idset import IdSet
from headrace.producer.bulk.ledger import Ledger
from headrace.producer.bulk.reader import ReadOptions, Scan, open_input, read_tasks, scan, stamp
from headrace.producer.bulk.sidecar import Fingerprint
from headrace.producer.bulk.window import by_prefix
from headrace.producer.bulk.writer import errors_path
from headrace.producer.run_options import RunOptions, Summary
from headrace.producer.run_settings import run_settings
from headrace.producer.served import Served
from headrace.producer.session import Session
from headrace.producer.stop_on_signal import StopOnSignal


def run(options: RunOptions) -> Summary:
    """Do the whole file, or what earlier sessions left of it.

    Raises UnusableInput and UnusableOutput before anything was started, RedisUnavailable when
    there is no Redis to begin with, WorkerFailed when the local worker cannot work. Ctrl-C and
    SIGTERM end it in order, with `interrupted` set; the same command goes on.
    """
    errors = options.errors or errors_path(options.output)
    _check_paths(options, errors)
    read = ReadOptions(options.max_line_bytes, options.max_tasks)
    with contextlib.ExitStack() as stack:
        served = Served.look(options, stack)
        found = scan(options.input, served.parser(options), read)
        _refuse_bad_lines(options, found)
        settings = run_settings(
            options.output, errors, served.local, options.worker_arguments, os.environ
        )
        fingerprint = Fingerprint(found.sha256, served.identity, dict(options.defaults), settings)
        stop = stack.enter_context(StopOnSignal())
        ledger = stack.enter_context(
            Ledger(
                options.output,
                errors,
                fingerprint,
                restart=options.restart,
                retry_errors=options.retry_errors,
                ordered=options.ordered,
            )
        )
        file = stack.enter_context(open_input(options.input))
        if stamp(file) != found.stamp:
            raise UnusableInput("unreadable", f"{options.input} changed while it was read")
        ids = stack.enter_context(IdSet())
        items = read_tasks(file, served.parser(options), ids, read)
        work = by_prefix(ledger.work(items, options.on_bad_line))
        session = Session(options, served, ledger, found, stop)
        session.go(work)
        if not stop.requested and stamp(file) != found.stamp:
            raise UnusableInput(
                "unreadable",
                f"{options.input} changed while it ran: what is in {options.output} may not fit it",
            )
    return session.summary(errors)


def _check_paths(options: RunOptions, errors: Path) -> None:
    for path in (options.output, errors):
        if not path.parent.is_dir():
            raise UnusableOutput("unwritable", f"there is no folder {path.parent}")
        # What a resume reads back has to be a file; opening a pipe would wait for its other end.
        is_device = path.exists() and not (path.is_file() or path.is_dir())
        folder = path.parent.resolve()
        if is_device or folder == Path("/dev") or folder.is_relative_to("/proc"):
            raise UnusableOutput(
                "unwritable", f"{path} is no file that a run could go on with: write to a file"
            )
        if path.exists() and options.input.exists() and path.samefile(options.input):
            raise UnusableOutput(
                "same_file", "the input cannot be written over: choose another OUT"
            )


def _refuse_bad_lines(options: RunOptions, found: Scan) -> None:
    if found.bad and options.on_bad_line == "fail":
        first = found.examples[0]
        raise UnusableInput(
            first.code,
            f"{found.bad_lines} bad lines, and --on-bad-line is fail; the first is line"
            f" {first.line}: {first.message}",
            first.line,
        )
