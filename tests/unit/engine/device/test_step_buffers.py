"""A step's inputs arrive as they were when it was launched, however late the device is."""

import numpy as np
import pytest
import torch
from delayed_device import DelayedAccelerator, HostSync, no_looking

from headrace.engine.step_buffers import COPIES, StepBuffer


def launch(device: DelayedAccelerator, buffer: StepBuffer, step: int, seen: list[object]) -> None:
    """Send `step` in a fixed field and `step` times in an array, and note what arrives."""
    stage = buffer.begin()
    stage.host["number"][:2] = step
    stage.host["share"][:1] = step / 2
    arrays = stage.pack({"tokens": np.full(step, step), "small": np.arange(step, dtype=np.int32)})

    def work() -> None:
        stage.send()
        seen.append(
            (
                buffer.device["number"][:2].clone(),
                buffer.device["share"][:1].clone(),
                arrays["tokens"].clone(),
                arrays["small"].clone(),
            )
        )

    device.submit(work)
    stage.sent(device.mark())


def test_inputs_of_steps_in_flight_are_not_overwritten() -> None:
    """As many steps as there are blocks are launched before the first is done; the arrays grow
    from a few to thousands of bytes, so device memory is replaced in between."""
    device = DelayedAccelerator()
    buffer = StepBuffer(device, {"number": (np.int64, 3), "share": (np.float32, 2)})
    address = buffer.device["number"].data_ptr()
    seen: list[object] = []
    steps = [1, 5, 2000, 3, 4000, 7]
    for start in range(0, len(steps), COPIES):
        for step in steps[start : start + COPIES]:
            launch(device, buffer, step, seen)
        device.mark().wait()
    for step, found in zip(steps, seen, strict=True):
        number, share, tokens, small = found  # type: ignore[misc]
        assert number.tolist() == [step, step] and share.tolist() == [step / 2]
        assert tokens.tolist() == [step] * step and small.tolist() == list(range(step))
    assert buffer.device["number"].data_ptr() == address


def test_a_block_that_is_still_read_is_waited_for() -> None:
    """One launch more than there are blocks waits for the first; a runner never gets there, since
    one step at most is in flight when the next is launched."""
    device = DelayedAccelerator()
    buffer = StepBuffer(device, {"number": (np.int64, 3), "share": (np.float32, 2)})
    seen: list[object] = []
    for step in range(1, COPIES + 1):
        launch(device, buffer, step, seen)
    assert not seen
    device.launching = True
    with pytest.raises(HostSync):
        launch(device, buffer, 9, seen)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
    ],
)
def test_the_late_device_notices_a_look_at_a_value(look: object) -> None:
    """The device of these tests would prove nothing if it let a halt of the stream pass."""
    value = torch.ones(1)
    with pytest.raises(HostSync), no_looking():
        look(value)  # type: ignore[operator]
    with no_looking():
        assert value.add(1).index_select(0, torch.zeros(1, dtype=torch.int64)).shape == (1,)
