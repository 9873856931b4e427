"""The names of the launcher's flags, which are torchrun's, and their `--help`."""

from __future__ import annotations

LAUNCH_IS = "start of the ranks, as torchrun names it; on the command line, not in a file"
STANDALONE = "--standalone"
LAUNCH_FLAGS = {
    "--nproc-per-node": (
        "N",
        "Start N ranks on this machine, or `gpu`: one for each GPU. All checks run first.",
    ),
    "--nnodes": ("N", "Number of machines; the same command is started on each. Default 1."),
    "--rdzv-endpoint": ("HOST:PORT", "Where several machines meet: one of them, and a free port there."),
    "--rdzv-backend": ("NAME", "c10d: the machines number themselves; static: --node-rank numbers them."),
    "--rdzv-id": ("NAME", "Name of the job, where several jobs meet at the same endpoint."),
    "--node-rank": ("N", "Number of this machine, from 0; with --master-addr or --rdzv-backend static."),
    "--master-addr": ("HOST", "The machine with --node-rank 0, in place of --rdzv-endpoint."),
    "--master-port": ("PORT", "A free port there; default 29500."),
    "--max-restarts": ("N", "How often the ranks are started again after one has failed; default 0."),
    STANDALONE: ("", "One machine and a free port: the default."),
}
"""Name -> placeholder of its value, and its meaning."""


def launch_help() -> str:
    """The launcher's flags as paragraphs of `--help`, after a heading."""
    return f"{LAUNCH_IS}\n" + "".join(
        f"  {f'{name} {value}'.strip()}\n    {text}\n" for name, (value, text) in LAUNCH_FLAGS.items()
    )
