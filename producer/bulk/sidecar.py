"""The small file beside OUT that says which run OUT belongs to."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.producer.bulk.errors import UnusableOutput

_VERSION = 1
# Letters and digits only: a run id is the beginning of job ids.
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a resume must share with the run that it goes on with. `settings`: further ones, by
    what they are called; None: not known, and not compared."""

    input_sha256: str
    model: str
    sampling: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] | None = None

    def differences(self, other: "Fingerprint") -> list[str]:
        """In words, this one being the earlier."""
        found = []
        if self.input_sha256 != other.input_sha256:
            found.append("the input file's content")
        if self.model != other.model:
            found.append(f"the model ({self.model} then, {other.model} now)")
        if self.sampling != other.sampling:
            then, now = _shown(self.sampling), _shown(other.sampling)
            found.append(f"the sampling parameters ({then} then, {now} now)")
        if self.settings is not None and other.settings is not None:
            for name in sorted(self.settings.keys() | other.settings.keys()):
                then, now = self.settings.get(name, "none"), other.settings.get(name, "none")
                if then != now:
                    found.append(f"the {name} ({then} then, {now} now)")
        return found


@dataclass(frozen=True, slots=True)
class Sidecar:
    """`run_id` begins every job id of the run; `attempt` counts its --retry-errors rounds."""

    fingerprint: Fingerprint
    run_id: str
    attempt: int = 0

    @property
    def job_prefix(self) -> str:
        return self.run_id if not self.attempt else f"{self.run_id}r{self.attempt}"


def sidecar_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.headrace")


def new_sidecar(fingerprint: Fingerprint) -> Sidecar:
    return Sidecar(fingerprint, "".join(secrets.choice(_ALPHABET) for _ in range(12)))


def read_sidecar(output: Path) -> Sidecar | None:
    """None when there is none. Raises UnusableOutput when it is damaged or of a newer version."""
    path = sidecar_path(output)
    try:
        data = orjson.loads(path.read_bytes())
        if data["v"] != _VERSION:
            raise UnusableOutput("sidecar", f"{path} was written by another version of Headrace")
        return Sidecar(
            Fingerprint(
                str(data["input_sha256"]),
                str(data["model"]),
                dict(data["sampling"]),
                dict(data["settings"]) if data.get("settings") is not None else None,
            ),
            str(data["run_id"]),
            int(data["attempt"]),
        )
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise UnusableOutput("sidecar", f"{path} is damaged: use --restart to start over") from None


def write_sidecar(output: Path, sidecar: Sidecar) -> None:
    """Atomic and durable."""
    path = sidecar_path(output)
    fresh = path.with_name(path.name + ".tmp")
    data = {
        "v": _VERSION,
        "input_sha256": sidecar.fingerprint.input_sha256,
        "model": sidecar.fingerprint.model,
        "sampling": sidecar.fingerprint.sampling,
        "settings": sidecar.fingerprint.settings,
        "run_id": sidecar.run_id,
        "attempt": sidecar.attempt,
    }
    with fresh.open("wb") as file:
        file.write(orjson.dumps(data, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were just created in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items())) or "none"
