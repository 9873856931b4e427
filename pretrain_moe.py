"""Train a Mixture-of-Experts language model: `python pretrain_moe.py --nproc-per-node N @examples/FILE.args [flags]`.

The program is moe_overlap/commands/train.py; installed, it is also called `moe-train`.
"""

from moe_overlap.commands.train import main, run

__all__ = ["main"]

if __name__ == "__main__":
    run()
