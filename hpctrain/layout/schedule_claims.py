"""What each schedule promises, as formulas: activations alive at once, and the idle part of a step."""

from __future__ import annotations

from hpctrain.layout.schedule import groups


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
