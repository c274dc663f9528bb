"""`headrace autoscale simulate` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from headrace.worker.autoscale.cli import autoscale, simulate_command

SMALL = ["simulate", "--shape", "steady", "--jobs", "300", "--duration", "1h"]


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(autoscale, list(arguments), env=environment)


def test_the_table_shows_every_policy_and_one_recommendation() -> None:
    result = run(*SMALL)
    assert result.exit_code == 0
    for name in ("pending @", "outstanding @", "tokens @", "deadline @"):
        assert any(line.startswith(name) for line in result.output.splitlines())
    assert result.output.count("Recommended: ") == 1


def test_json_is_one_object_and_the_same_each_time() -> None:
    first, second = run(*SMALL, "--json", "--samples"), run(*SMALL, "--json", "--samples")
    assert first.output == second.output
    answer = json.loads(first.output)
    assert answer["version"] == 1
    assert {r["policy"] for r in answer["results"]} == {
        "pending",
        "outstanding",
        "tokens",
        "deadline",
    }
    assert answer["recommended"]["policy"] in {"outstanding", "tokens", "deadline"}
    assert {"at_s", "pending", "running", "replicas", "ready", "metric"} == set(
        answer["results"][0]["samples"][0]
    )


def test_several_targets_are_compared_side_by_side() -> None:
    arguments = ["--policy", "outstanding", "--policy", "tokens", "--json"]
    for value in ("outstanding=5", "outstanding=500", "tokens=60"):
        arguments += ["--target", value]
    results = json.loads(run(*SMALL, *arguments).output)["results"]
    assert [(r["policy"], r["target"]) for r in results] == [
        ("outstanding", 5.0),
        ("outstanding", 500.0),
        ("tokens", 60.0),
    ]
    assert results[0]["peak_replicas"] > results[1]["peak_replicas"]


def test_targets_are_halved_until_one_holds_the_goals() -> None:
    """Bursts, and a wait just above the cold start: the target that the formula gives is slow."""
    arguments = "simulate --shape burst --jobs 6000 --duration 8h --acceptable-wait 4m --json"
    arguments += " --behavior none --policy outstanding"
    given = json.loads(run(*arguments.split(), "--search", "0").output)
    searched = json.loads(run(*arguments.split()).output)
    assert not given["recommended"]["meets_goals"]
    assert searched["recommended"]["meets_goals"]
    targets = [result["target"] for result in searched["results"]]
    assert targets == [targets[0] / 2**i for i in range(len(targets))]
    assert len(targets) > 1


def test_spot_costs_less_and_is_counted_apart() -> None:
    options = ["--policy", "tokens", "--json", "--spot-interruptions", "0"]
    plain = json.loads(run(*SMALL, *options).output)["results"][0]
    spot = json.loads(run(*SMALL, *options, "--spot-share", "1").output)["results"][0]
    assert spot["on_demand_hours"] == plain["spot_hours"] == 0.0
    assert spot["gpu_hours"] == pytest.approx(plain["gpu_hours"])
    assert spot["cost"] == pytest.approx(plain["cost"] * 1.6 / 4.0)


def test_flags_come_from_the_environment_under_the_root_command_too() -> None:
    root = click.Group("headrace", context_settings={"auto_envvar_prefix": "HEADRACE"})
    root.add_command(autoscale)
    environment = {
        "HEADRACE_AUTOSCALE_SIMULATE_JOBS": "77",
        "HEADRACE_AUTOSCALE_SIMULATE_POLICY": "tokens deadline",
        "HEADRACE_AUTOSCALE_SIMULATE_COLD_START": "90s",
    }
    for command, arguments in ((root, ["autoscale", *SMALL[:3]]), (autoscale, SMALL[:3])):
        result = CliRunner().invoke(command, [*arguments, "--json"], env=environment)
        answer = json.loads(result.output)
        assert answer["scenario"]["jobs"] == 77
        assert answer["scenario"]["cold_start_s"] == 90.0
        assert [r["policy"] for r in answer["results"]] == ["tokens", "deadline"]


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n0,1,1\n1,1,many\n")
    result = run("simulate", "--trace", str(path))
    assert result.exit_code == 2
    assert f"{path}:3: output_tokens 'many' is no number" in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--cold-start", "soon"], "'soon' is no duration"),
        (["--deadline", "-5"], "no finite duration"),
        (["--target", "depth=5"], "'depth' is none of pending"),
        (["--target", "tokens=0"], "no number above 0"),
        (["--policy", "tokens", "--target", "deadline=1"], "--policy leaves deadline out"),
        (["--outage", "5m"], "write START+LENGTH"),
        (["--min-replicas", "30"], "--min-replicas 30 is above --max-replicas 20"),
        (["--acceptable-wait", "0"], "--acceptable-wait must be above 0"),
        (["--trace", "gone.csv"], "cannot read gone.csv: No such file"),
        (["--trace", "a.csv", "--bulk-file", "b.jsonl"], "give one of them"),
        (["--jobs", "5", "--prompt-tokens", "1e300"], "is too large"),
        (["--jobs", "5", "--initial-replicas", "5000"], "5000 is above --max-replicas 20"),
        (["--jobs", "5", "--duration", "1e9d"], "a shorter --duration or --run-on"),
        (["--jobs", "5", "--run-on", "1e9d"], "a shorter --duration or --run-on"),
        (["--jobs", "5", "--polling", "1e-6s"], "a longer --scrape and --polling"),
        (["--jobs", "1000000000000"], "1<=x<=10000000"),
        (["--jobs", "5", "--search", "100000"], "0<=x<=20"),
        (["--jobs", "5", "--max-replicas", "10000000000"], "1<=x<=10000"),
        (["--decode-rate", "inf"], "'--decode-rate'"),
        (["--decode-rate", "nan"], "'--decode-rate'"),
        (["--prefill-rate", "-1"], "'--prefill-rate'"),
        (["--stream-rate", "0"], "'--stream-rate'"),
        (["--prompt-tokens", "inf"], "'--prompt-tokens'"),
        (["--spread", "nan"], "'--spread'"),
        (["--spot-interruptions", "inf"], "'--spot-interruptions'"),
        (["--spot-share", "nan"], "'--spot-share'"),
        (["--on-demand-price", "inf"], "'--on-demand-price'"),
    ],
)
def test_what_is_wrong_is_said_and_exits_2(arguments: list[str], problem: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code == 2
    assert problem in result.output


def test_a_trace_of_more_jobs_than_fit_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,count\n0,1,1,5\n1,1,1,1000000000000\n")
    result = run("simulate", "--trace", str(path))
    assert result.exit_code == 2
    assert f"{path}:3: more than 10,000,000 jobs" in result.output


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    result = run(*SMALL, "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 20_000


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*SMALL, "--plot", str(tmp_path / "plot.png"))
    assert result.exit_code == 1
    assert "pip install 'headrace[plot]'" in result.output


def test_every_option_is_explained_and_has_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    helped = run("simulate", "--help").output
    prefix = "HEADRACE_AUTOSCALE_SIMULATE"
    context = click.Context(simulate_command, auto_envvar_prefix=prefix)
    for option in simulate_command.params:
        assert isinstance(option, click.Option)
        assert option.help, option.name
        assert option.opts[0] in helped
        monkeypatch.setenv(f"{prefix}_{(option.name or '').upper()}", "something")
        assert option.resolve_envvar_value(context) == "something"


def test_a_bulk_file_and_an_outage_run(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "say something", "max_tokens": 400}\n' * 500)
    result = run(
        "simulate", "--bulk-file", str(path), "--deadline", "2h", "--outage", "5m+5m", "--json"
    )
    assert result.exit_code == 0, result.output
    assert all(r["finished"] == 500 for r in json.loads(result.output)["results"])


@pytest.mark.parametrize("controller", ["keda", "hpa"])
@pytest.mark.parametrize("behavior", ["recommended", "kubernetes", "none"])
def test_every_controller_and_behavior_finishes_the_work(controller: str, behavior: str) -> None:
    options = ["--controller", controller, "--behavior", behavior, "--min-replicas", "1"]
    result = run(*SMALL, *options, "--fallback-replicas", "2", "--sync-jitter", "3s", "--json")
    assert result.exit_code == 0, result.output
    assert all(r["unfinished"] == 0 for r in json.loads(result.output)["results"])


def test_importing_the_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, headrace.worker.autoscale.cli\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'redis', 'rq', 'pydantic', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print(sorted(m for m in sys.modules if m.startswith(('headrace.engine', "
        "'headrace.kernels', 'headrace.producer'))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
