"""Grouped products read the experts' weights where DDP keeps them: no tensor of all of them is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.model.layers.expert_weights import AscendingExperts, joined
from megatron.training.model.layers.local_modules import GroupedExperts
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue
from moe_overlap.runtime.weight_grad.split_linear import defer_weight_gradients
from tests.unit.runtime.one_process import MOE, loss_of, small
from tests.unit.runtime.test_split_backward import grouped

STACKED = {(4, 64, 32), (4, 32, 32)}
"""Shapes of the weights of four experts: gated first product, second product."""


class Copies(TorchDispatchMode):
    """Counts the tensors of all experts' weights that something wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        result = function(*arguments, **(named or {}))
        name = function.overloadpacket.__name__
        writes = name in ("stack", "cat", "clone", "copy_", "_to_copy")
        self.count += writes and isinstance(result, torch.Tensor) and tuple(result.shape) in STACKED
        return result


def trained(flags: str, deferred: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """How often weights were copied in a forward and a backward pass, and the main gradients."""
    made, queue = small(f"{MOE} {flags}"), WeightGradQueue()
    model = grouped(made)
    assert sum(isinstance(module, AscendingExperts) for module in model.modules()) == 2
    if deferred:
        defer_weight_gradients(model, queue)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, delay_wgrad_compute=deferred)
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=made.groups.collection)
    with Copies() as copies:
        loss_of(ddp).backward()
        queue.run_all()
    return copies.count, {name: parameter.main_grad.clone() for name, parameter in ddp.named_parameters()}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("flags", ["", "--bf16"])
def test_no_copy_of_all_weights_is_made(flags: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, gradients = trained(flags, deferred)
    assert copies == 0
    monkeypatch.setattr(GroupedExperts, "joined", staticmethod(lambda weights: torch.stack(list(weights))))
    monkeypatch.setattr(
        "megatron.training.model.layers.local_modules.joined_with_gradients",
        lambda weights, _: torch.stack(list(weights)),
    )
    stacked, expected = trained(flags, deferred)
    # Both products of two layers, and once more in the backward pass of products that are split.
    assert stacked == (8 if deferred else 4)
    assert gradients.keys() == expected.keys() and all(
        torch.equal(gradients[name], expected[name]) for name in expected
    )
    assert all(gradients[name].abs().sum() > 0 for name in gradients if ".experts." in name)


def test_weights_that_do_not_lie_so_are_copied() -> None:
    memory = torch.arange(40.0)
    even = [memory[start : start + 6].view(2, 3) for start in (1, 11, 21)]
    together = joined(even)
    assert (
        torch.equal(together, torch.stack(even))
        and together.untyped_storage()._cdata == memory.untyped_storage()._cdata
    )
    descending, overlapping = even[::-1], [memory[start : start + 6].view(2, 3) for start in (0, 3, 6)]
    uneven = [memory[start : start + 6].view(2, 3) for start in (0, 10, 21)]
    apart = [torch.ones(2, 3), torch.ones(2, 3)]
    turned = [memory[0:6].view(3, 2).t(), memory[6:12].view(3, 2).t().contiguous()]
    for weights in (descending, overlapping, uneven, apart, turned):
        together = joined(weights)
        assert torch.equal(together, torch.stack(list(weights)))
        assert together.untyped_storage()._cdata != memory.untyped_storage()._cdata
    assert torch.equal(joined(even[:1])[0], even[0])


def test_experts_keep_their_numbers() -> None:
    made = small(MOE)
    experts = grouped(made).decoder.layers[0].mlp.experts.local_experts
    assert [name for name, _ in experts.named_children()] == ["0", "1", "2", "3"] and experts[2] is list(experts)[2]
    assert [name for name, _ in experts.named_modules() if name.isdigit()] == ["3", "2", "1", "0"]
    stock = made.adapted(SpanRecorder()).decoder.layers[0].mlp.experts.local_experts
    assert list(experts.state_dict()) == list(stock.state_dict())
