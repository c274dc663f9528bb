"""Whatever reading a model's files stumbles over is the files' fault, and is said with their name.

Files come from anywhere: what is checked by name is checked where it is read, and the rest of what
a damaged or foreign file can do to a parser ends here. Imports no torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.engine.errors import CheckpointError, EngineError


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """CheckpointError naming `path`, or the file inside it, for what reading it raises."""
    try:
        yield
    except EngineError:
        raise
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else path
        raise CheckpointError(f"{place}: {error.strerror or error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is damaged: it is nested too deeply") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} is damaged, or of a kind that is not supported"
            f" ({type(error).__name__}: {str(error)[:200]})"
        ) from error
