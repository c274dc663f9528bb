"""One variant in memory: the engine that answers, and its runner, which reads whole texts."""

from dataclasses import dataclass

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.loading.source import resolve_model
from headrace.engine.runner import ModelRunner, load_runner
from headrace.engine.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    runner: ModelRunner

    @classmethod
    def load(cls, config: EngineConfig) -> "Loaded":
        """Raises CheckpointError or EngineError, as `Engine.load` does."""
        tokenizer = load_tokenizer(resolve_model(config.model))
        runner = load_runner(config)
        return cls(Engine.of(config, runner, tokenizer, tokenizer.eos_token_ids), runner)
