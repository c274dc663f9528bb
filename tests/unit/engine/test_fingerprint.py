"""A digest names what an answer depends on, and changes with each of it."""

from dataclasses import fields, replace

import pytest

from headrace.engine import fingerprint
from headrace.engine.fingerprint import Fingerprint

ONE = Fingerprint("abc", "float32", "none", "auto", "cpu", fingerprint.cpu(2))


@pytest.mark.parametrize("name", [item.name for item in fields(Fingerprint)])
def test_the_digest_changes_with_every_field(name: str) -> None:
    other = replace(ONE, **{name: not ONE.deterministic if name == "deterministic" else "other"})
    assert other.digest != ONE.digest
    assert replace(ONE).digest == ONE.digest


def test_the_digest_changes_with_sources_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ONE.digest
    assert before.startswith("fp_") and len(before) == 19
    monkeypatch.setattr(fingerprint, "sources_digest", lambda: "other")
    changed = ONE.digest
    monkeypatch.setattr(fingerprint, "package_versions", lambda: {"torch": "0"})
    assert len({before, changed, ONE.digest}) == 3


def test_only_deterministic_workers_ask_for_the_same_code_and_machine() -> None:
    """A job's checkpoint is taken over by a newer version, but for the mode that promises bits."""
    elsewhere = replace(ONE, processor=fingerprint.cpu(8))
    assert str(elsewhere) == str(ONE)
    assert str(replace(elsewhere, deterministic=True)) != str(replace(ONE, deterministic=True))
    assert str(replace(ONE, kv_cache_dtype="int8")) != str(ONE)


def test_versions_and_sources_are_found() -> None:
    parts = ONE.parts()
    assert parts["torch"] and parts["headrace"]
    assert len(parts["sources"]) == 16
    assert fingerprint.cpu(2).endswith(":2 threads")
