"""From cases to verdicts: what runs where, and what is held against what."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.config.schema import RunConfig
from hpctrain.errors import HpctrainError
from hpctrain.launch.local.zygote import RankFailure, Zygote
from hpctrain.layout.fits import MEMORY
from hpctrain.train.schedule import peak_lr
from hpctrain.verify.cases import CannotJudge, Case

if TYPE_CHECKING:  # torch is imported after the zygote is made
    from hpctrain.verify.compare import Distances, Finding, Tolerance
    from hpctrain.verify.trace import Share, Trace

IMPORTS = ("torch", "torch.distributed", "torch.optim", "hpctrain.verify.rank", "hpctrain.verify.reference")
OF_ENGINE = {"deepspeed": ("deepspeed",), "fsdp": ("torch._dynamo", "hpctrain.sharding.fsdp.engine")}
DAY_S = 86400.0


@dataclass(frozen=True)
class Verdict:
    """About one layout.

    Attributes:
        case: it.
        found: the worst difference of each kind; empty where it did not run.
        why: the tolerance is what it is.
        error: why it did not run to its end, or passed over a step.
        unjudged: it did not run because there is nothing in its precision that it could be held against.
    """

    case: Case
    found: Mapping[str, Finding] = field(default_factory=dict)
    why: str = ""
    error: str = ""
    unjudged: bool = False

    @property
    def good(self) -> bool:
        return not self.error and all(finding.good for finding in self.found.values())

    @property
    def word(self) -> str:
        """It in a word or two."""
        if self.found:
            return "ok" if self.good else "DIFFERS"
        return "cannot be judged" if self.unjudged else "did not run"

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no infinity: a difference that is not finite is null."""
        config = self.case.config
        return {
            "layout": self.case.text,
            "ranks": self.case.world,
            "engine": config.engine,
            "stage": config.sharding.stage,
            "precision": config.train.precision,
            "ok": self.good,
            "verdict": self.word,
            "error": self.error or None,
            "why": self.why or None,
            **{
                kind: {"difference": _finite(f.worst), "where": f.where, "limit": _finite(f.limit)}
                for kind, f in self.found.items()
            },
        }


class Runner(Protocol):
    """Runs the ranks of a case."""

    def __call__(self, config: RunConfig, world: int, steps: int) -> Sequence[Share]: ...


class Local:
    """Ranks on this machine, over gloo, forked from a warm process; the reference too.

    To be made before this process imports torch or starts threads.

    Args:
        engines: of the cases.
    """

    def __init__(self, engines: Collection[str]) -> None:
        if "deepspeed" in engines:
            os.environ["DS_ACCELERATOR"] = "cpu"  # which it would otherwise look for, and say so
        self._zygote = Zygote((*IMPORTS, *(name for engine in engines for name in OF_ENGINE.get(engine, ()))))

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self._zygote.close()

    def reference(self, config: RunConfig, steps: int) -> Trace:
        """The float64 run in one process."""
        from hpctrain.verify.reference import reference

        (trace,) = self._zygote.run(reference, 0, _with(config, "float64"), steps, timeout_s=DAY_S)
        found: Trace = trace
        return found

    def memory(self, config: RunConfig, world: int) -> Sequence[Mapping[str, int]]:
        """Of each rank, the most bytes of tensors that were alive in each phase of a step."""
        from hpctrain.verify.memory import measured

        return self._zygote.run(measured, world, config.model_dump(mode="json"), timeout_s=DAY_S)

    def __call__(self, config: RunConfig, world: int, steps: int) -> Sequence[Share]:
        from hpctrain.verify.rank import run

        return self._zygote.run(run, world, config.model_dump(mode="json"), steps, timeout_s=DAY_S)


class Judge:
    """Holds layouts against the reference; what several of them need is run once.

    Args:
        local: runs the reference, and one process in each precision.
        steps: optimizer steps.
    """

    def __init__(self, local: Local, steps: int) -> None:
        self._local, self._steps = local, steps
        self._references: dict[str, Trace] = {}
        self._measured: dict[str, Distances] = {}

    def verdicts(self, cases: Sequence[Case], run: Runner, begin: Callable[[Case], None]) -> Iterator[Verdict]:
        """One after the other; `begin` is told before each."""
        for case in cases:
            begin(case)
            yield self.verdict(case, run)

    def verdict(self, case: Case, run: Runner) -> Verdict:
        """Run a layout and judge it."""
        from hpctrain.verify.compare import distances, findings
        from hpctrain.verify.trace import assemble

        if case.refused:
            return Verdict(case, error=case.refused)
        config = case.config
        try:
            want, allowed = self._want(config), self._allowed(config)
            got = assemble(config, run(config, case.world, self._steps))
        except HpctrainError as error:
            return Verdict(case, error=_sentence(error), unjudged=isinstance(error, CannotJudge))
        found = distances(got, want, peak_lr(config.optimizer, config.train))
        return Verdict(case, findings(found, allowed), allowed.why, _skips(got))

    def _want(self, config: RunConfig) -> Trace:
        key = _key(config)
        if key not in self._references:
            self._references[key] = self._local.reference(config, self._steps)
        return self._references[key]

    def _allowed(self, config: RunConfig) -> Tolerance:
        from hpctrain.verify.compare import distances, tolerance, without_gradient
        from hpctrain.verify.trace import assemble

        precision = config.train.precision
        if precision == "float64":
            return tolerance(precision, None)
        key = f"{precision} {_key(config)}"
        if key not in self._measured:
            alone = _alone(config)
            trace = assemble(alone, self._local(alone, 1, self._steps))
            if trace.skipped:
                mend = f"lower train.loss_scale={config.train.loss_scale:g}" if precision == "fp16" else "lower the lr"
                raise CannotJudge(f"{precision} cannot be judged: one process in it {_skips(trace)}; {mend}.")
            lr = peak_lr(config.optimizer, config.train)
            self._measured[key] = distances(trace, self._want(config), lr)
        return tolerance(precision, self._measured[key], without_gradient(self._want(config)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _skips(trace: Trace) -> str:
    """What is wrong with a run that did not take every step."""
    steps = ", ".join(map(str, trace.skipped))
    return f"skipped step {steps}, in which something was not finite" if steps else ""


def _sentence(error: HpctrainError) -> str:
    """Of a rank that failed, the end of its traceback says it, after the name of an exception; ours are sentences."""
    said = str(error)
    if isinstance(error, RankFailure):
        said = [line.strip() for line in said.splitlines() if line.strip()][-1]
        said = re.sub(r"^hpctrain[.\w]*: ", "", said)
    if said.startswith(f"{MEMORY}="):
        said = f"{said.removesuffix('.')}; or verify a smaller model, for example with model.layers=2."
    return said


def _key(config: RunConfig) -> str:
    """All that the reference depends on."""
    train = config.train.model_copy(update={"precision": "float64", "micro_batch": 1, "overlap": True})
    parts = (config.model, config.data, config.optimizer, train)
    return "\n".join(part.model_dump_json() for part in parts)


def _with(config: RunConfig, precision: str) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def _alone(config: RunConfig) -> RunConfig:
    """The same run in one process, without an engine that shards."""
    plain = type(config.parallel)(), type(config.sharding)()
    return config.model_copy(update={"parallel": plain[0], "sharding": plain[1]})
