"""What can be wrong with a bulk file. No Redis here.

BulkError (HeadraceError)
├── UnusableInput    the whole input file; `code` is one of the validation codes or `unreadable`
└── UnusableOutput   the output beside it: somebody else's file, another run's, or in use
"""

from dataclasses import dataclass

from headrace.producer.errors import HeadraceError


class BulkError(HeadraceError):
    """A whole file that cannot be used. The message says what was wrong and what to do."""

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.line = line


class UnusableInput(BulkError):
    """The input file as a whole: empty, too long, unreadable."""


class UnusableOutput(BulkError):
    """The output file as a whole: foreign, of another run, locked."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """One input line that cannot become a request. `custom_id` where the line had a usable one."""

    line: int
    code: str
    message: str
    custom_id: str | None = None
    param: str | None = None
