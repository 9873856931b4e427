"""Slowdowns of the jobs of a stage, read off when they ran.

Slots (use_slowdowns.py) let what belongs to one use start at once. In the list copies go on from earlier uses beside those that
later ones begin, and start as they find room, so that they meet other work than their slots say. A play of a stage tells when
every job ran (`StageChannels.ran`); here each job's rate is averaged over that time, by the work that went on beside it. Played
again at these rates jobs run at other times, whose slowdowns differ by little: the second time around they are nearly those of
the list. Where three streams or more are busy, each of the others is taken to be busy beside a job independently of the rest.

Method. Jobs of one task (such as all gathers) follow each other, and so do those of another: job p of the one can meet jobs p + d
of the other alone, where d is looked for outwards until nothing meets. Tokens travel in a share of a use; in that share it keeps
the links among ranks busy and not the processor.

Legend: P places of uses, N strategies; arrays are [P, N].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
JobKey = tuple[str, int]
"""The task of a job, and the place of the use that it belongs to."""
Ran = dict[JobKey, tuple[Floats, Floats]]
"""Job -> its begin and end; [N] each. Of strategies without it they are equal."""
Slowed = Mapping[JobKey, Floats]
"""Job -> how many times as long it takes as alone; [N]."""
COMPUTE, RANKS, TO_DEVICE, TO_HOST = range(4)
"""The streams of interference.py."""
BIT = (8, 4, 2, 1)
"""The bit of each in a set of busy streams (`Interference.table`)."""
STREAMS = {
    "compute": COMPUTE,
    "gather": RANKS,
    "scatter": RANKS,
    "weights": TO_DEVICE,
    "activations": TO_DEVICE,
    "gradients": TO_DEVICE,
    "left": TO_HOST,
}
BEGINS = dict.fromkeys(("gather", "weights", "activations", "gradients"), -1) | {"compute": 0, "scatter": 1, "left": 1}
"""By how many places the use beside which a job begins stands behind its own."""


def slowdowns_of(ran: Ran, sent: Floats, shared: Floats, table: Floats) -> Slowed:
    """How many times as long as alone each job takes.

    Args:
        ran: all jobs of uses.
        sent: share of the uses in which tokens travel.
        shared: by how much collectives of a use's states and tokens slow each other down.
        table: `Interference.table`.
    """
    # Half as many bytes: rates are accurate to 1e-4, and most of the time is that of reading and writing.
    sent, shared, table = (values.astype(np.float32) for values in (sent, shared, table))
    begins, ends = _stacked(ran, sent)
    beside = {(task, stream): np.zeros_like(sent) for task in begins for stream in range(4)}
    sending = {task: np.zeros_like(sent) for task in begins}
    crowded = np.zeros_like(sent)
    for one, other in ((one, other) for one in begins for other in begins if STREAMS[one] < STREAMS[other]):
        for mine, theirs, both in _meetings(one, other, begins, ends):
            beside[one, STREAMS[other]][mine] += both
            if one != "compute":
                beside[other, STREAMS[one]][theirs] += both
                continue
            travels = both * sent[mine]
            sending[other][theirs] += travels
            beside[other, COMPUTE][theirs] += both - travels
            if STREAMS[other] == RANKS:
                crowded[mine] += both * shared[theirs]
    slowed: dict[JobKey, Floats] = {}
    places: dict[str, list[int]] = {task: [] for task in begins}
    for task, place in ran:
        places[task].append(place)
    for task in begins:
        lasted = ends[task] - begins[task]
        shares = {stream: beside[task, stream] / lasted for stream in range(4) if stream != STREAMS[task]}
        if task == "compute":
            met = beside[task, RANKS]
            rates = _use_rates(shares, sent, crowded / np.where(met > 0, met, 1.0), table)
        else:
            crowd = 1.0 + shared if STREAMS[task] == RANKS else 1.0
            rates = _job_rates(STREAMS[task], shares, sending[task] / lasted, crowd, table)
        slow = (1.0 / rates).astype(np.float64)
        slowed.update({(task, place): slow[place] for place in places[task]})
    return slowed


def _stacked(ran: Ran, like: Floats) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Begins and ends of all jobs by task; where there is none, the begin of the next, so that they are in order, and no end."""
    begins: dict[str, Floats] = {}
    ends: dict[str, Floats] = {}
    for (task, place), (begin, end) in ran.items():
        if task not in begins:
            begins[task], ends[task] = np.full_like(like, np.inf), np.full_like(like, -np.inf)
        begins[task][place], ends[task][place] = begin, end
    for task in begins:
        absent = ends[task] <= begins[task]
        begins[task][absent], ends[task][absent] = np.inf, -np.inf
        begins[task] = np.minimum.accumulate(begins[task][::-1])[::-1]
    return begins, ends


def _meetings(
    one: str, other: str, begins: Mapping[str, Floats], ends: Mapping[str, Floats]
) -> Iterator[tuple[slice, slice, Floats]]:
    """Places of jobs of two tasks, and the seconds in which both of them ran."""
    places = len(begins[one])
    near = BEGINS[one] - BEGINS[other]
    for step in (1, -1):
        for apart in range(near if step == 1 else near - 1, step * places, step):
            mine = slice(max(0, -apart), places - max(0, apart))
            theirs = slice(max(0, apart), places - max(0, -apart))
            begin, end = begins[other][theirs], ends[other][theirs]
            # Those further apart are later, or earlier, still.
            if not (begin < ends[one][mine] if step == 1 else end > begins[one][mine]).any():
                break
            both = np.minimum(ends[one][mine], end)
            both -= np.maximum(begins[one][mine], begin)
            np.maximum(both, 0.0, out=both)
            yield mine, theirs, both


def _use_rates(shares: Mapping[int, Floats], sent: Floats, crowd: Floats, table: Floats) -> Floats:
    """Seconds of its own work that a use does in a second.

    Args:
        shares: stream -> the share of its time in which that is busy.
        crowd: by how much collectives and its tokens slow each other down.
    """
    rates, computes = np.zeros_like(sent), 1.0 - sent
    sends, crowded = sent, sent * (1.0 + crowd)
    for others, chance in _chances(shares):
        slow = computes * table[COMPUTE, BIT[COMPUTE] | others]
        slow += (crowded if others & BIT[RANKS] else sends) * table[RANKS, BIT[RANKS] | others]
        rates += np.divide(chance, slow, out=slow)
    return rates


def _job_rates(
    stream: int, shares: Mapping[int, Floats], sends: Floats, crowd: Floats | float, table: Floats
) -> Floats:
    """The same for copies and collectives.

    Args:
        sends: share of their time beside tokens that travel.
        crowd: how many times as long they take for those.
    """
    rates, own = np.zeros_like(sends), BIT[stream]
    alike, computes = 1.0 / table[stream], shares[COMPUTE]
    sends_crowded = sends / crowd
    idle = 1.0 - computes - sends
    for others, chance in _chances({other: share for other, share in shares.items() if other != COMPUTE}):
        rate = idle * alike[own | others]
        rate += computes * alike[BIT[COMPUTE] | own | others]
        rate += sends_crowded * alike[BIT[RANKS] | own | others]
        rate *= chance
        rates += rate
    return rates


def _chances(shares: Mapping[int, Floats]) -> list[tuple[int, Floats | float]]:
    """Sets of streams, as sums of their bits, each with the share of the time in which they are busy and the others are not."""
    found: list[tuple[int, Floats | float]] = [(0, 1.0)]
    for stream, share in shares.items():
        # Most strategies move little: without a stream there are half as many sets.
        if share.any():
            rest = 1.0 - share
            found = [
                (bits | own, chance * part) for bits, chance in found for own, part in ((0, rest), (BIT[stream], share))
            ]
    return found
