"""The engine: token ids in, token ids out. Nothing here knows Redis, queues or jobs."""
