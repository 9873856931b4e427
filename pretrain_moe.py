"""Train a Mixture-of-Experts language model: `torchrun --nproc-per-node N pretrain_moe.py @examples/FILE.args [flags]`.

The program is moe_overlap/commands/train.py; installed, it is also called `moe-train`.
"""

from moe_overlap.commands.train import main, run

__all__ = ["main"]

if __name__ == "__main__":
    run()
