"""A host is reached by whichever of its addresses answers, and soon, whatever the others do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpctrain.launch.meet.knock import answers

HERE = ("127.0.0.1", "127.0.0.1")


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names that the resolver says nothing of, as long as the test runs; and which were asked for."""
    asked: list[str] = []
    over = threading.Event()
    known = socket.getaddrinfo

    def lookup(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        if host.startswith("lost"):
            over.wait(60)
            raise socket.gaierror("nobody answers")
        return known(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield asked
    over.set()


def test_the_first_that_answers_is_enough(port: int, unknown: list[str]) -> None:
    assert next(answers(["127.0.0.1", "lost"], port, 5.0)) == HERE
    assert unknown == ["127.0.0.1"], "others are not asked"


def test_names_that_nobody_knows_cost_a_moment(port: int, unknown: list[str]) -> None:
    began = time.monotonic()
    assert next(answers(["lost-1", "lost-2", "127.0.0.1"], port, 30.0)) == HERE
    assert unknown == ["lost-1", "lost-2", "127.0.0.1"] and time.monotonic() - began < 15


def test_what_fails_at_once_is_passed_over(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        closed = gone.getsockname()[1]
    assert list(answers(["127.0.0.1"], closed, 5.0)) == []
    assert list(answers(["\u2060.", "127.0.0.1"], port, 5.0)) == [HERE]


def test_all_that_answer_are_told_apart(port: int) -> None:
    """The first may be another's."""
    assert list(answers(["127.0.0.1", "127.0.0.1"], port, 5.0)) == [HERE, HERE]


def test_it_ends_where_nobody_answers(unknown: list[str]) -> None:
    assert list(answers(["lost"], 1, 0.5)) == []
