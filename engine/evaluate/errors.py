"""What an evaluation refuses before it begins, each message with what was wrong and what to do."""

from headrace.engine.errors import EngineError


class EvaluateError(EngineError):
    """A question file, text or option that cannot be used."""
