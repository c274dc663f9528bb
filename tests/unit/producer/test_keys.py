"""Names of keys, and how fast a producer starts."""

import os
import subprocess
import sys

import pytest
import rq.defaults

from headrace.producer import keys
from headrace.producer.errors import InvalidName


def test_the_prefix_is_rqs_own() -> None:
    assert keys.PREFIX == rq.defaults.RQ_KEY_PREFIX


def test_the_prefix_follows_rqs_variable() -> None:
    code = "from headrace.producer import keys, scripts; print(keys.job('a'))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RQ_KEY_PREFIX": "{acme}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == "{acme}:job:a"


@pytest.mark.parametrize("queue", ["llama-3.1-8b", "Qwen/Qwen2.5-7B", "a"])
@pytest.mark.parametrize("priority", keys.PRIORITIES)
@pytest.mark.parametrize("tenant", [None, "acme"])
def test_a_list_knows_its_queue_priority_and_tenant(queue, priority, tenant) -> None:
    name = keys.list_name(queue, priority, tenant)
    assert keys.queue_of(name) == queue
    assert keys.priority_of(name) == priority
    assert keys.tenant_of(name) == tenant


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a@b", "q.high", "q.low", "q.suspect", "ü"])
def test_a_queue_name_that_could_break_a_key_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        keys.check_queue(name)


@pytest.mark.parametrize("job_id", ["", "a:b", "a b", "a\n", "x" * 129, None, 7])
def test_a_job_id_that_could_break_a_key_is_refused(job_id: object) -> None:
    with pytest.raises(InvalidName):
        keys.check_id("job_id", job_id)


def test_the_producer_imports_neither_torch_nor_rq_nor_anything_of_the_worker() -> None:
    code = (
        "import sys; from headrace.producer import Client; "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'rq', 'numpy') "
        "or m.startswith(('headrace.worker', 'headrace.engine'))]; print(bad)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
