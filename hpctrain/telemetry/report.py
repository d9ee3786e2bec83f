"""Pictures of a run, made from what it recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpctrain.files import write_picture
from hpctrain.telemetry.metrics import Record, read_records


def curve(records: Iterable[Record], kind: str, key: str = "loss") -> tuple[list[int], list[float]]:
    """Steps and values of one key over the records of a kind, those without a number left out."""
    steps: list[int] = []
    values: list[float] = []
    for record in records:
        step, value = record.get("step"), record.get(key)
        if record.get("kind") == kind and isinstance(step, int) and isinstance(value, (int, float)):
            steps.append(step)
            values.append(float(value))
    return steps, values


def loss_curve(metrics: Path, picture: Path, unigram_entropy: float | None = None) -> bool:
    """Draw training and validation loss over steps as a PNG.

    Args:
        metrics: a file of records.
        picture: the file to write.
        unigram_entropy: of the corpus, nats a token, drawn as a line: what knowing token frequencies alone gives.

    Returns:
        Whether there was anything to draw; if not, no file is written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_records(metrics))
    train, validation = curve(records, "train"), curve(records, "eval")
    if not train[0] and not validation[0]:
        return False
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*train, label="training", linewidth=1)
    if validation[0]:
        axes.plot(*validation, label="validation", marker="o")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, label="unigram entropy", color="gray", linestyle="--")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    write_picture(picture, figure)
    return True
