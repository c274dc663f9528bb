"""A callback that a test allows."""

called: list[str] = []


def record(job_id: str) -> None:
    called.append(job_id)
