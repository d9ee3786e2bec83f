"""Clocks of a GPU: events around every call, and captured graphs. Needs CUDA."""

from __future__ import annotations

import itertools

import torch

from hpctrain.comms.backend import Act


def timed_events(act: Act, iterations: int) -> list[float]:
    """Seconds of each call on the current stream, between events; calls are queued one after the other, as nccl-tests
    does."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]


def timed_events_apart(act: Act, barrier: Act, iterations: int) -> list[float]:
    """The same with a barrier before each call, which is not counted, and an end to each before the next: nccl-tests'
    -z 1."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    out = []
    for _ in range(iterations):
        barrier()
        torch.cuda.synchronize()
        begin.record()
        act()
        end.record()
        torch.cuda.synchronize()
        out.append(begin.elapsed_time(end) / 1e3)
    return out


def graphed(act: Act, calls: int) -> Act:
    """What replays one captured graph of so many calls. The call must have run before, so that connections and plans
    exist."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            act()
    return graph.replay
