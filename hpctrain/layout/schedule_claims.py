"""What each schedule promises, as formulas: activations alive at once, and the idle part of a step."""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.layout.schedule import groups


class Bubble(NamedTuple):
    """The idle part of a step, from 0 to 1, and the formula it comes from."""

    share: float
    formula: str


def claimed_peak(name: str, stages: int, chunks: int, micro_batches: int, rank: int) -> int:
    """Most activations that a rank keeps at once, of one micro-batch on one virtual stage each.

    An activation is alive from its forward until its backward is complete, weights included. With p = stages,
    m = micro-batches, v = chunks, r = rank, g = the size of a group (`schedule.groups`; p where p divides m):

    - gpipe: m.
    - 1f1b: min(m, p - r). Narayanan et al. 2021, arXiv 2006.09503.
    - interleaved: (v - 1) g + min(m, 2 (p - 1 - r) + 1): a group through all chunks but one, and the warm-up.
      Narayanan et al. 2021, arXiv 2104.04473, with the warm-up of Megatron-LM.
    - zb-h1: on every rank what 1f1b, or with chunks interleaved, keeps on rank 0. Qi et al. 2023, arXiv 2401.10241.
    - zb-v: min(2 m, 2 p), in half-stages; p whole stages, as 1f1b. Qi et al. 2023, arXiv 2401.10241, section 6.
    """
    if name == "gpipe":
        return micro_batches
    if name == "zb-v":
        return 2 * min(micro_batches, stages)
    below = stages - 1 if name == "zb-h1" else stages - 1 - rank
    if chunks == 1:
        return min(micro_batches, below + 1)
    group = min(micro_batches, len(groups(stages, micro_batches)[0]))
    return (chunks - 1) * group + min(micro_batches, 2 * below + 1)


def claimed_bubble(
    name: str,
    stages: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1,
    backward_input: float = 1,
    backward_weight: float = 1,
) -> Bubble | None:
    """Idle part of the time of all ranks from the first action of a step to its last.

    For equal stages and transfers that take no time; the times are those of one micro-batch on a rank's whole share
    of the model. With p = stages, m = micro-batches, v = chunks, and times F, I, W:

    - gpipe, 1f1b: (p - 1) / (m + p - 1). Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473,
      section 2.2, where the same idle time is given as a part of the busy time, (p - 1) / m.
    - interleaved: (p - 1) / (v m + p - 1). Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
    - zb-h1: ranks are idle for (p - 1) (F + I - W), where W is no longer than F and I. Qi et al. 2023,
      arXiv 2401.10241, table 2. Otherwise for (p - 1) max(F, I): a step begins with forwards that pass all ranks.
    - zb-h1 with chunks: (p - 1) F / v, for F = I = W. The same argument for interleaved 1F1B, ours.
    - zb-v: (p - 1) F / 2, for F = I = W: before that the last rank has nothing to do. The paper counts no bubble, as
      its ranks do not wait for each other between steps: Qi et al. 2023, arXiv 2401.10241, section 6; see
      `Timeline.own_bubble`, which is 0 from 2 p - 1 micro-batches on.

    Returns:
        None where the formula does not hold: all but gpipe and 1f1b need p micro-batches or more, and chunks of rank
        after rank also groups of just the micro-batches there are (`schedule.groups`).
    """
    whole = forward + backward_input + backward_weight
    if name in ("gpipe", "1f1b"):
        return Bubble((stages - 1) / (micro_batches + stages - 1), "(p-1) / (m+p-1)")
    if micro_batches < stages or (name != "zb-v" and chunks > 1 and _padded(stages, micro_batches)):
        return None
    if name == "interleaved":
        return Bubble((stages - 1) / (chunks * micro_batches + stages - 1), "(p-1) / (vm+p-1)")
    if chunks == 1:
        idle = max(forward, backward_input, forward + backward_input - backward_weight)
        text = "(p-1)(F+I-W)" if backward_weight <= min(forward, backward_input) else "(p-1)max(F,I)"
    elif forward == backward_input == backward_weight:
        idle, text = forward / chunks, "(p-1)F/v"
    else:
        return None
    idle *= stages - 1
    return Bubble(idle / (micro_batches * whole + idle), f"x / (m(F+I+W)+x), x = {text}")


def _padded(stages: int, micro_batches: int) -> bool:
    return groups(stages, micro_batches)[-1].stop > micro_batches
