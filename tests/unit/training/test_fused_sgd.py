"""--optimizer sgd where a fused SGD is installed: a stand-in keeps a flag for its kernel, as the libraries' do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training import optimizer as training_optimizer


class FusedSGD(torch.optim.SGD):
    """Keeps its flag where the first parameter lies that its constructor sees."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.flag = torch.zeros(1, dtype=torch.int, device=self.param_groups[0]["params"][0].device)


def test_the_flag_of_a_fused_kernel_lies_where_the_parameters_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_optimizer, "sgd_class", lambda: FusedSGD)
    weight = torch.nn.Parameter(torch.empty(4, device="meta"))
    groups = [{"params": [weight], "lr": 0.5, "weight_decay": 0.1}]
    sharded = SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=groups))
    chained: Any = SimpleNamespace(chained_optimizers=[sharded])
    flags: Any = SimpleNamespace(lr=0.5, sgd_momentum=0.9)
    training_optimizer._step_by_sgd(chained, flags, weight.device)
    made: Any = sharded.optimizer
    assert made.flag.device == weight.device and made.param_groups is groups
    assert groups[0]["momentum"] == 0.9 and groups[0]["weight_decay"] == 0.1
