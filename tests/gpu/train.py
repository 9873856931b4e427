"""One launch of several cases: `torchrun … -m tests.gpu.train FOLDER STEPS NAME …`, on GPUs where torch sees them, else on CPUs.

Every case loads the weights of FOLDER/weights; the launch that finds none saves those of its first case. The losses of a case
stand in FOLDER/DEVICE-NUMBER.jsonl, as --log-json writes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.commands.exits import end_process
from tests.gpu.cases import BY_NAME, CASES, Case

WEIGHTS = "weights"


def log_of(folder: Path, device: str, case: Case) -> Path:
    """The losses of a case on `cuda` or `cpu`."""
    return folder / f"{device}-{CASES.index(case):02d}.jsonl"


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
    for name in argv[2:]:
        case = BY_NAME[name]
        saves = not (folder / WEIGHTS).exists()
        start = ["--save"] if saves else ["--finetune", "--resume-with-changes", "--ckpt-step", "0", "--load"]
        device = device_of_this_process().type
        words = [*case.words(device), "--train-iters", str(steps), *start, str(folder / WEIGHTS)]
        log = ["--log-json", str(folder / "log.jsonl")]
        parsed = parse([*words, *log])
        validate(parsed.config, case.ranks)
        torch.use_deterministic_algorithms(parsed.config.training.deterministic_mode)
        process = process or start_process(parsed.config)
        log[1] = str(log_of(folder, device, case))
        loop = assemble(parse([*words, *log]), process.rank)
        if saves:
            loop.save_now()
        loop.run()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
