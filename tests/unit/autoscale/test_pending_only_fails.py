"""The scenario of the README: what scaling on the waiting jobs alone does to long jobs."""

import json
import shlex

from click.testing import CliRunner

from headrace.worker.autoscale.cli import autoscale

# A file of 60 long answers. All 60 fit into the slots of the first worker, so that nothing waits
# from the moment it is ready, and the cooldown runs while it works.
COMMAND = (
    "simulate --shape bulk --jobs 60 --prompt-tokens 2000 --output-tokens 12000 --spread 0.3 "
    "--slots 64 --deadline 2h"
)
README = shlex.split(COMMAND)


def results(*more: str) -> dict[str, dict[str, float]]:
    run = CliRunner().invoke(autoscale, [*README, *more, "--json"])
    assert run.exit_code == 0, run.output
    return {result["policy"]: result for result in json.loads(run.output)["results"]}


def test_pending_only_stops_busy_workers_again_and_again() -> None:
    """With checkpoints the jobs get through, late and at several times the cost."""
    by_policy = results()
    pending, deadline = by_policy["pending"], by_policy["deadline"]
    assert pending["busy_removals"] >= 10
    assert pending["requeued"] > 60
    assert pending["missed"] >= 1
    assert pending["latency_s"]["p95"] > 2 * deadline["latency_s"]["p95"]  # type: ignore[index]
    for name in ("outstanding", "tokens", "deadline"):
        assert by_policy[name]["busy_removals"] == 0
        assert by_policy[name]["missed"] == 0


def test_pending_only_without_checkpoints_never_finishes_a_job() -> None:
    """Cooldown 360 s + drain 120 s is less than a job's 21 minutes: each start is thrown away."""
    by_policy = results("--no-checkpoint")
    assert by_policy["pending"]["unfinished"] == 60
    assert by_policy["pending"]["gpu_hours"] > 10 * by_policy["deadline"]["gpu_hours"]
    for name in ("outstanding", "tokens", "deadline"):
        assert by_policy[name]["finished"] == 60


def test_pending_only_is_never_recommended() -> None:
    run = CliRunner().invoke(autoscale, [*README])
    assert "pending @ 14 fails: 1 deadline missed (1.67 %)" in run.output
    assert "Recommended: deadline @ 1" in run.output
    alone = CliRunner().invoke(
        autoscale, ["simulate", "--shape", "steady", "--jobs", "50", "--policy", "pending"]
    )
    assert "Nothing to recommend" in alone.output
