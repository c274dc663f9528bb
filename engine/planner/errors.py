"""What the planner refuses, each message with what was wrong and what to do."""

from headrace.engine.errors import EngineError


class PlanError(EngineError):
    """A plan that cannot be made: an unknown card or model, an unreadable file, bad lengths."""
