"""Workers: claim jobs from Redis, keep the engine's batch full, write every result once."""
