"""What the planner calls runnable is what the engine makes at load, by the same names."""

import pytest

from headrace.engine.errors import EngineError
from headrace.engine.planner.schemes import parse_scheme
from headrace.engine.planner.support import FLOATS_UP_TO, runs_scheme
from headrace.engine.quant.choose import PACKED_ABOVE, load_time_method

NAMES = (
    *("int8", "int8-dynamic", "nf4", "nf4-double", "fp4", "bnb-int8"),
    *(
        f"int{bits}-g{group}{kind}"
        for bits in (3, 4)
        for group in (32, 64, 128)
        for kind in ("", "-sym")
    ),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_planner_are_names_of_the_engine(name: str) -> None:
    assert runs_scheme(parse_scheme(name))
    load_time_method(name)


def test_what_the_engine_lacks_is_not_called_runnable() -> None:
    assert not runs_scheme(parse_scheme("int2-g64"))
    with pytest.raises(EngineError, match="'int2-g64' is not supported"):
        load_time_method("int2-g64")


def test_both_know_from_where_on_a_file_s_blocks_stay_packed() -> None:
    assert FLOATS_UP_TO == PACKED_ABOVE
