"""One launch of several cases: `torchrun … -m tests.gpu.train FOLDER STEPS NAME …`, on GPUs where torch sees them, else on CPUs.

Every case loads the weights of its model, FOLDER/weights/MODEL; the first case of a model that finds none saves its own. The
losses of a case stand in FOLDER/DEVICE-NUMBER.jsonl, as --log-json writes them. A case that resumes stops in the middle and goes
on in a run that loads what it has saved, FOLDER/DEVICE-NUMBER.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.commands.exits import end_process
from tests.gpu.cases import BY_NAME, CASES, MODELS, Case

WEIGHTS = "weights"
LOADS = ("--finetune", "--resume-with-changes", "--ckpt-step", "0")


def log_of(folder: Path, device: str, case: Case) -> Path:
    """The losses of a case on `cuda` or `cpu`."""
    return folder / f"{device}-{CASES.index(case):02d}.jsonl"


def weights_of(folder: Path, model: str) -> Path:
    """The checkpoint that all cases of a model start from."""
    return folder / WEIGHTS / model.replace(" ", "-")


def main(argv: Sequence[str]) -> int:
    """Train the cases one after the other in this rank."""
    from megatron.training import cpu_backend
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.start import quiet_libraries
    from moe_overlap.commands.device_settings import settle_environment

    for name in argv[2:]:
        # Of all cases, before anything asks CUDA: it reads its settings once.
        settle_environment(parse(BY_NAME[name].words()).config, os.environ)
    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch
    import torch.distributed as dist

    from megatron.training.cli.validation import validate
    from megatron.training.initialize import device_of_this_process, start_process
    from moe_overlap.commands.train import assemble

    folder, steps = Path(argv[0]), int(argv[1])
    process = None
    # Before the ranks meet: a rank that is ahead makes these folders.
    missing = {model for model in MODELS if not weights_of(folder, model).exists()}
    for name in argv[2:]:
        case, device = BY_NAME[name], device_of_this_process().type
        log = log_of(folder, device, case)
        words = [*case.words(device), "--train-iters", str(steps)]
        weights, saved = str(weights_of(folder, case.model)), str(log.with_suffix(""))
        saves = case.model in missing and not case.resumes
        missing.discard(case.model)
        runs = [["--save", weights] if saves else [*LOADS, "--load", weights]]
        if case.resumes:
            half = ["--exit-interval", str(steps // 2)]
            runs = [["--save", saved, *half, *LOADS, "--load", weights], ["--load", saved]]
        for start in runs:
            parsed = parse([*words, *start, "--log-json", str(log)])
            validate(parsed.config, case.ranks)
            torch.use_deterministic_algorithms(parsed.config.training.deterministic_mode)
            process = process or start_process(parsed.config)
            loop = assemble(parsed, process.rank)
            if saves:
                loop.save_now()
            loop.run()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
