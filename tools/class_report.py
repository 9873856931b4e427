"""What was decided for each class of layers, as text and JSON: a part of the answer of tools/autotune.py."""

from __future__ import annotations

from typing import Any

from moe_overlap.tuner.search.layer.mix_mechanisms import ClassChoice, Mix, Tried


def classes_json(mix: Mix | None) -> dict[str, Any] | None:
    """Steps are those without deferred weight gradients; null where no plan with overlap fits."""
    if mix is None:
        return None
    return {
        "step_seconds": mix.seconds,
        "differs_from_uniform": mix.changed,
        "predictions": mix.predictions,
        "complete": mix.complete,
        "classes": [_class_json(one) for one in mix.classes],
    }


def _class_json(one: ClassChoice) -> dict[str, Any]:
    others = [
        {"mechanism": name, "refused": tried.refused}
        if tried.seconds is None
        else {"mechanism": name, "step_seconds": tried.seconds}
        for name, tried in one.others
    ]
    return {"class": one.alike.name, "layers": list(one.alike.layers), "mechanism": one.chosen, "others": others}


def classes_text(mix: Mix | None) -> list[str]:
    """A line for each class, and one for each of its other mechanisms."""
    if mix is None:
        return ["", "by class of layers: nothing that overlaps fits"]
    kind = "a mix" if mix.changed else "no mix is shorter"
    ended = "" if mix.complete else ", ended by their number"
    head = f"by class of layers: {kind}, {mix.seconds:.4f} s a step without deferred weight gradients"
    lines = ["", f"{head}; {mix.predictions} predictions{ended}"]
    for one in mix.classes:
        lines.append(f"           {_shown(one.alike.layers)} ({one.alike.name}): {one.chosen}")
        lines += [f"             not {name}: {_why(tried, mix.seconds)}" for name, tried in one.others]
    return lines


def _why(tried: Tried, chosen: float) -> str:
    return tried.refused if tried.seconds is None else f"{tried.seconds:.4f} s ({tried.seconds / chosen - 1:+.2%})"


def _shown(layers: tuple[int, ...]) -> str:
    """`L3 L7 … L59 (15)`."""
    if len(layers) <= 4:
        return " ".join(f"L{layer}" for layer in layers)
    return f"L{layers[0]} L{layers[1]} … L{layers[-1]}, {len(layers)} layers"
