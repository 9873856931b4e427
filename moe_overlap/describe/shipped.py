"""The model and cluster files that come with this project: in `examples/` of a checkout, inside the package of a wheel.

`--model mixtral-8x7b` names one of them, a path never; an unknown name is answered with the near ones. Standard library only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from moe_overlap.describe.errors import ConfigError, one_of

_PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLES = next(
    (folder for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples") if folder.is_dir()),
    _PACKAGE / "examples",
)
"""The folder of the shipped files."""
_LONGEST_NAME = 100


def shipped_models() -> Mapping[str, Path]:
    """The shipped model files by name, such as `mixtral-8x7b`."""
    return {path.stem: path for path in sorted((EXAMPLES / "models").glob("*.json"))}


def model_path(text: str, subject: str) -> Path:
    """The model file that a user means: a path, or the name of a shipped model in any case, with its organisation or without.

    Raises:
        ConfigError: neither a file nor a shipped model; the error names the near ones.
    """
    path, models = Path(text), shipped_models()
    organisation, _, name = text.lower().rpartition("/")
    is_path = text.startswith((".", "/", "~")) or "/" in organisation or (organisation and path.parent.is_dir())
    if (
        is_path
        or path.exists()
        or path.suffix == ".json"
        or not name
        or not text.isprintable()
        or len(text) > _LONGEST_NAME
    ):
        return path
    if name in models:
        return models[name]
    near = _near(name, models)
    fix = f"did you mean {one_of(near)}? Else give" if near else "--list-models prints the shipped ones; or give"
    raise ConfigError(subject, text, "is neither a file nor a shipped model", f"{fix} the path of its config.json")


def _near(name: str, models: Mapping[str, Path]) -> tuple[str, ...]:
    """Up to three shipped models with a similar name, whatever its hyphens, dots and endings such as `-Instruct-v0.1`."""
    plain = {re.sub(r"\W|_", "", model): model for model in models if not model.startswith("tiny-")}
    text = re.sub(r"\W|_", "", name)
    contained = [model for key, model in plain.items() if key in text or (len(text) > 3 and text in key)]
    contained.sort(key=lambda model: abs(len(model) - len(name)))
    similar = [plain[key] for key in difflib.get_close_matches(text, plain, 3, 0.6)]
    return tuple(dict.fromkeys((*contained, *similar)))[:3]
