"""`PoolingParams` checks itself."""

from __future__ import annotations

from typing import Any

import pytest

from piecegraph import PoolingParams
from piecegraph.errors import RequestError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": 0}, "dimensions=0; it must be a whole number, 1 or more"),
        ({"dimensions": True}, "dimensions=True; it must be a whole number"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2; it must be a whole number, -1 or more"),
        ({"truncate_prompt_tokens": 0}, "leaves nothing of a text"),
        ({"normalize": 1}, "normalize=1; it must be True, False or None"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**fields)


def test_fields_of_another_task_are_refused() -> None:
    PoolingParams(dimensions=4, normalize=True).check_task("embed")
    with pytest.raises(RequestError, match="dimensions=4 has no meaning for 'classify', which takes"):
        PoolingParams(dimensions=4).check_task("classify")
