"""Each test starts and ends without logged losses: megatron-core keeps them for the process, sized by the first model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker


@pytest.fixture(autouse=True)
def no_logged_losses() -> Iterator[None]:
    get_moe_layer_wise_logging_tracker().clear()
    yield
    get_moe_layer_wise_logging_tracker().clear()
