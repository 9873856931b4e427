"""Runs of tests/multiprocess/test_routing_ranks.py on two ranks."""

from __future__ import annotations

from typing import Any

SEQUENCE, SAMPLES, EXPERTS = 6, 5, 8


def balance(sizes: list[int]) -> list[dict[str, Any]]:
    """Gradients and logged values of the balancing losses, by (losses, group of the ranks): megatron-core's and ours."""
    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_overlap.runtime.routing.gates import TopKGate

    world, me = dist.group.WORLD, dist.get_rank()
    alone = [dist.new_group([rank]) for rank in range(2)][me]
    generator = torch.Generator().manual_seed(me)
    logits = torch.randn(2, SEQUENCE, SAMPLES, EXPERTS, generator=generator)
    weights = torch.randn(SEQUENCE, SAMPLES, EXPERTS, generator=generator)
    found = []
    for near in (world, alone):
        collection = ProcessGroupCollection(tp=alone, cp=near, tp_cp=near, tp_dp_cp=world)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            num_moe_experts=EXPERTS,
            add_bias_linear=False,
            moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
            moe_aux_loss_coeff=[0.3, 0.2, 0.1],
            moe_z_loss_coeff=0.01,
        )
        for ours in (False, True):
            router = (TopKGate if ours else TopKRouter)(config=config, pg_collection=collection)
            router.set_layer_number(1)
            clear_aux_losses_tracker()
            gradients = []
            for micro_batch in range(2):
                x = logits[micro_batch].clone().requires_grad_()
                if ours:
                    state = router.begin(SEQUENCE, SAMPLES, len(sizes))
                    cut = x.split(sizes, dim=1)
                    parts = [router.route_logits(part, state, p)[0] for p, part in enumerate(cut)]
                    shaped = [part.reshape(SEQUENCE, -1, EXPERTS) for part in parts]
                    probs = torch.cat(shaped, dim=1)
                else:
                    probs = router.routing(x)[0].reshape(SEQUENCE, SAMPLES, EXPERTS)
                (probs * weights).sum().backward()
                gradients.append(x.grad.tolist())
            tracker = get_moe_layer_wise_logging_tracker()
            values = {name: entry["values"].item() for name, entry in tracker.items()}
            places = {name: (entry["reduce_group"], entry["reduce_group_has_dp"]) for name, entry in tracker.items()}
            names = {name: (group is world, has_dp) for name, (group, has_dp) in places.items()}
            found.append({"gradients": gradients, "values": values, "groups": names})
    return found
