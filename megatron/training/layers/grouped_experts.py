"""Experts as two grouped matrix products of torch, for a GPU without Transformer Engine.

The parameters, and so the checkpoints, are those of megatron-core's SequentialMLP; only the products are batched over experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

# Legend: T rows of this rank's experts, E its experts, H hidden, I expert width (twice that for a gated first product).


class GroupedExperts(SequentialMLP):
    """SequentialMLP in two `torch.nn.functional.grouped_mm` calls instead of 2 · E products.

    With biases in the experts the sequential form runs: a grouped product has none. Not yet run on a GPU.
    """

    def forward(self, rows_TH: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run every expert on its rows.

        Args:
            rows_TH: rows sorted by expert.
            tokens_per_expert: [E] rows of each expert; zeros are allowed.
            probs_T: the router's score of each row.
        Returns:
            [T, H] weighted outputs, and no bias.
        """
        if self.config.add_bias_linear or self.config.moe_apply_probs_on_input or rows_TH.shape[0] == 0:
            return super().forward(rows_TH, tokens_per_expert, probs_T)
        ends_E = tokens_per_expert.cumsum(0).to(device=rows_TH.device, dtype=torch.int32)
        hidden_TI = self.grouped_product(rows_TH, [expert.linear_fc1 for expert in self.local_experts], ends_E)
        if self.config.gated_linear_unit:
            gate_TI, up_TI = hidden_TI.chunk(2, dim=-1)
            limit, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
            if limit is not None:
                gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(min=-limit, max=limit)
            hidden_TI = self.config.activation_func(gate_TI) * (up_TI + offset if offset else up_TI)
        else:
            hidden_TI = self.config.activation_func(hidden_TI)
        hidden_TI = (hidden_TI * probs_T.unsqueeze(-1)).to(rows_TH.dtype)
        return self.grouped_product(hidden_TI, [expert.linear_fc2 for expert in self.local_experts], ends_E), None

    def grouped_product(self, rows: Tensor, linears: list[torch.nn.Module], ends_E: Tensor) -> Tensor:
        """Each expert's rows times its weight, transposed; a method, so that its backward pass can be replaced.

        Args:
            ends_E: int32, where the rows of each expert end.
        """
        weights_E = torch.stack([linear.weight for linear in linears])
        return F.grouped_mm(rows, weights_E.transpose(1, 2), offs=ends_E)
