"""Layers of a config.json that are no attention (state-space, linear), told by its fields. Standard library only.

Nothing here prices or trains such a layer, and a table of names would miss next month's families: what a file says of its layers
decides. Sparse attention keeps the sizes of attention, so that a prediction answers with attention to all tokens, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from moe_overlap.describe.model import MOST_LAYERS
from moe_overlap.describe.readers.hugging_face_fields import Fields

_OTHER_KINDS = ("linear", "mamba", "ssm", "recurrent", "rwkv", "delta", "lightning", "conv", "kda")
"""Parts of the names of layers that do not attend."""
_KIND_LISTS = ("layer_types", "layers_block_type", "block_types", "layer_type_list")
_OTHER_FIELDS = ("mamba_", "ssm_", "linear_", "time_step_", "rwkv_", "state_size", "conv_kernel", "lru_width")
"""Beginnings of fields that only models with such layers have."""
_SPARSE_FIELDS = ("index_topk", "index_n_heads", "index_head_dim", "sparse_attention_config", "moba_config")
FIX = "bring a model whose layers all attend"


def require_attention(fields: Fields) -> None:
    """Refuse layers that are no attention, by their numbers; note sparse attention.

    Raises:
        ConfigError: a field says that a layer is state-space or linear attention.
    """
    name, others, kind = _other_layers(fields)
    if others:
        rule = f"layers {_ranges(others)} are {kind}, no attention: not modelled"
        raise fields.error(name, "", rule, FIX)
    present = sorted(field for field in fields.values if field.startswith(_OTHER_FIELDS) and fields.values[field])
    if present and name == "":
        rule = "these fields are of state-space or linear-attention layers, which are not modelled"
        raise fields.error(", ".join(present[:4]) + (", …" if present[4:] else ""), "", rule, FIX)
    if name and name != "layer_types":
        fields.get(name)
    sparse = [field for field in _SPARSE_FIELDS if fields.values.get(field)]
    for field in sparse:
        fields.get(field)
    if sparse:
        rule, fix = "its sparse attention is not modelled", "tools/predict.py answers with attention to all tokens"
        fields.unbuilt.append(fields.error(", ".join(sparse), "", rule, fix))


def _other_layers(fields: Fields) -> tuple[str, list[int], str]:
    """The field that tells the kinds of the layers ("" without one), those that are no attention, and what they are."""
    values = fields.values
    for name in _KIND_LISTS:
        if isinstance(kinds := values.get(name), list):
            kinds = [str(kind) for kind in kinds]
            others = [layer for layer, kind in enumerate(kinds) if any(part in kind for part in _OTHER_KINDS)]
            return name, others, " and ".join(dict.fromkeys(kinds[layer] for layer in others))
    if isinstance(bits := values.get("attn_type_list"), list):
        return "attn_type_list", [layer for layer, bit in enumerate(bits) if bit == 0], "linear attention"
    if isinstance(pattern := values.get("hybrid_override_pattern"), str):
        return "hybrid_override_pattern", [layer for layer, kind in enumerate(pattern) if kind == "M"], "state-space"
    linear = values.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(layers := linear.get("kda_layers"), list):
        # They count from one.
        return "linear_attn_config", [layer - 1 for layer in layers if isinstance(layer, int)], "linear attention"
    count = _positive(values.get("num_hidden_layers"))
    if not 0 < count <= MOST_LAYERS:
        return "", [], ""
    period, offset = _positive(values.get("attn_layer_period")), values.get("attn_layer_offset", 0)
    if period and isinstance(offset, int):
        return "attn_layer_period", [layer for layer in range(count) if layer % period != offset], "state-space"
    if interval := _positive(values.get("full_attention_interval")):
        others = [layer for layer in range(count) if (layer + 1) % interval]
        return "full_attention_interval", others, "linear attention"
    if isinstance(attending := values.get("attn_layer_indices"), list):
        return "attn_layer_indices", [layer for layer in range(count) if layer not in attending], "state-space"
    return "", [], ""


def _positive(value: object) -> int:
    """A positive whole number; 0 for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _ranges(layers: Iterable[int]) -> str:
    """`0-2, 4-6, 8`, shortened."""
    runs = []
    for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(runs) if len(runs) <= 6 else f"{', '.join(runs[:5])}, … {runs[-1]}"
