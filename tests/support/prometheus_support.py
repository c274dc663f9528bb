"""A real Prometheus on loopback, and the exporter as a process: scraped, queried, killed."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from redis_support import free_port
from tools import tool


class ExporterProcess:
    """`headrace exporter`, as the chart's container starts it; on the same port again."""

    def __init__(self, redis_url: str, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self._log = log
        self._command = [sys.executable, "-P", "-m", "headrace.producer.cli", *arguments]
        self._command += ["--redis-url", redis_url, "--host=127.0.0.1", f"--port={self.port}"]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        with self._log.open("ab") as sink:
            self.process = subprocess.Popen(
                self._command, stdout=sink, stderr=sink, env=environment
            )
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://{self.target}/healthz", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < end, self._log.read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


class PrometheusServer:
    """Scrapes `targets` every second, evaluates `rules` as often. Every series carries the
    label namespace, as the operator and the usual scrape configurations add it."""

    def __init__(self, targets: Sequence[str], rules: Path, namespace: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-prometheus-"))
        self.base = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules.resolve())],
            "scrape_configs": [
                {
                    "job_name": "exporter",
                    "scrape_timeout": "1s",
                    "static_configs": [
                        {"targets": list(targets), "labels": {"namespace": namespace}}
                    ],
                }
            ],
        }
        file = self.directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [tool("prometheus"), f"--config.file={file}", "--log.level=warn"]
        command += [f"--storage.tsdb.path={self.directory / 'data'}"]
        command += [f"--web.listen-address={self.base.removeprefix('http://')}"]
        self._log = self.directory / "log"
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink)
        end = time.monotonic() + 60
        while not self._is_ready():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def ask(self, query: str) -> tuple[int, str]:
        """Status and body of an instant query, as a scaler gets them."""
        url = f"{self.base}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def samples(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every sample; a scalar has no labels."""
        status, body = self.ask(query)
        assert status == 200, body
        data = json.loads(body)["data"]
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(sample["metric"], float(sample["value"][1])) for sample in data["result"]]

    def settle(self) -> None:
        """Returns when every target has been scraped, and every rule evaluated after that, since
        the call. What is asked then is the state at the call or later, never before."""
        scraped = self._wait("a scrape", time.time(), self._last_scrape)
        self._wait("an evaluation", scraped, self._last_evaluation)

    def _wait(self, what: str, since: float, last: Any) -> float:
        end = time.monotonic() + 60
        while last() <= since:
            assert time.monotonic() < end, f"{what} never came: {self._log.read_text()}"
            time.sleep(0.05)
        return time.time()

    def _last_scrape(self) -> float:
        """When the oldest of the targets' last scrapes began, successful or not."""
        samples = self.samples("min(timestamp(up))")
        return samples[0][1] if samples else 0.0

    def _last_evaluation(self) -> float:
        with urllib.request.urlopen(f"{self.base}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        return min(datetime.fromisoformat(_short(g["lastEvaluation"])).timestamp() for g in groups)


def _short(moment: str) -> str:
    """Go writes nanoseconds, Python reads at most microseconds."""
    head, dot, tail = moment.partition(".")
    digits = "".join(c for c in tail[:9] if c.isdigit())
    zone = tail.lstrip("0123456789") if dot else ""
    return f"{head}.{digits[:6]}{zone}" if dot else moment
