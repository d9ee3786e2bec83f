"""Builds in parts: the same bytes whoever makes them, killed or not, in whatever form the text comes."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from hpctrain.comms.local import mpirun
from hpctrain.data import format, parts, pool
from hpctrain.data.bpe import save, train_bpe
from hpctrain.data.build import build, folder_of
from hpctrain.data.corpus import Corpus
from hpctrain.data.partfile import Writer
from hpctrain.data.records import Reading
from hpctrain.data.sources import list_sources
from hpctrain.data.tokenizer import JsonTokenizer
from hpctrain.errors import DataError
from tests.data.texts import text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, JSON lines plain and compressed; some documents occur more than once."""
    folder = tmp_path_factory.mktemp("sources")
    for n in range(20):
        (folder / f"{n}.txt").write_text(text(n))
    lines = [json.dumps({"text": text(n % 150), "question": text(1000 + n)}) + "\n" for n in range(400)]
    (folder / "a.jsonl").write_text("".join(lines))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[:50]))
    return folder


def run(folder, output, **how):
    how.setdefault("unit", 4000)
    return build(output, list_sources([folder]), [folder], **how)


@pytest.mark.parametrize("how", [{}, {"unique": True}, {"bpe": True}, {"bpe": True, "unique": True}])
def test_workers_do_not_show(folder, tokenizer, tmp_path, how):
    if how.pop("bpe", False):
        how["tokenizer"] = tokenizer
    run(folder, tmp_path / "one.h5", **how)
    run(folder, tmp_path / "two.h5", workers=2, **how)
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()
    Corpus.open(tmp_path / "one.h5").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.h5", "two.h5"]


def test_parts_do_not_show(folder, tmp_path):
    """Nor does their size, in an order that does not depend on it."""
    for size in (700, 3000, 10**6):
        listing = list_sources([folder], order="path")
        build(tmp_path / f"{size}.h5", listing, [folder], unit=size)
    first, *others = [(tmp_path / f"{size}.h5").read_bytes() for size in (700, 3000, 10**6)]
    assert all(other == first for other in others)


def test_documents_are_those_that_were_put_in(folder, tokenizer, tmp_path):
    listing = list_sources([folder / "a.jsonl"], order="path")
    header = build(tmp_path / "c.h5", listing, [folder], tokenizer=tokenizer, unit=2000)
    corpus = Corpus.open(tmp_path / "c.h5")
    assert header.documents == 400 and header.tokenizer == "bpe-300" and corpus.first_bad() is None
    for n in (0, 1, 57, 399):
        ids = corpus.tokens[corpus.documents[n] : corpus.documents[n + 1]]
        assert ids[-1] == tokenizer.end_of_document and tokenizer.decode(ids) == text(n % 150)
        assert ids[:-1].tolist() == tokenizer.encode(text(n % 150).encode()).tolist()


def test_duplicates_are_left_out_exactly(folder, tmp_path, monkeypatch):
    """The first of each text stays, in the order of the corpus, however little memory there is."""
    listing = list_sources([folder], order="path")
    build(tmp_path / "all.h5", listing, [folder], unit=2000)
    whole = Corpus.open(tmp_path / "all.h5")
    documents = [whole.tokens[a:b].tobytes() for a, b in zip(whole.documents[:-1], whole.documents[1:])]
    for together in (10, 100, 1 << 24):
        monkeypatch.setattr(
            "hpctrain.data.build.leave_out", lambda f, p, facts, n=together: parts_leave_out(f, p, facts, n)
        )
        header = build(tmp_path / f"{together}.h5", listing, [folder], unit=2000, unique=True)
        corpus = Corpus.open(tmp_path / f"{together}.h5")
        got = [corpus.tokens[a:b].tobytes() for a, b in zip(corpus.documents[:-1], corpus.documents[1:])]
        assert got == list(dict.fromkeys(documents)) and corpus.first_bad() is None
        assert header.provenance["duplicates"] == len(documents) - len(got) > 200


def parts_leave_out(*args):
    from hpctrain.data.duplicates import leave_out

    return leave_out(*args)


def test_prompts_are_read_and_not_learnt(folder, tokenizer, tmp_path):
    listing = list_sources([folder / "a.jsonl"], order="path")
    header = build(
        tmp_path / "c.h5", listing, [folder], tokenizer=tokenizer, reading=Reading(prompt="question"), unit=2000
    )
    corpus = Corpus.open(tmp_path / "c.h5")
    corpus.verify()
    assert header.loss_mask
    for n in (0, 7, 399):
        part = slice(corpus.documents[n], corpus.documents[n + 1])
        learnt = corpus.loss_mask[part].astype(bool)
        assert tokenizer.decode(corpus.tokens[part][~learnt]) == text(1000 + n)
        assert tokenizer.decode(corpus.tokens[part][learnt]) == text(n % 150)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    lines = "".join(json.dumps({"text": text(n % 30)}) + "\n" for n in range(40))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


@pytest.fixture(scope="module")
def undisturbed(few, tokenizer, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "c.h5"
    began = time.perf_counter()
    run(few, output, tokenizer=tokenizer, unique=True, unit=1500)
    return output.read_bytes(), time.perf_counter() - began


def test_killed_fifty_times_at_random_it_is_the_same(few, tokenizer, tmp_path, undisturbed):
    """Each build is killed until it ends by itself; of several processes, the builder or one of its workers. Some are
    killed as soon as workers are there, however fast the machine is, and the others after a while."""
    rng, chosen = random.Random(7), random.Random(8)
    kills, several, found, output = 0, 0, 0, tmp_path / "c.h5"
    while kills < 50:
        output.unlink(missing_ok=True)
        ended = False
        while not ended:
            workers, at_once = chosen.choice([1, 2, 3]), chosen.random() < 0.6
            pid, said = builder(
                lambda w=workers: run(few, output, tokenizer=tokenizer, unique=True, unit=1500, workers=w)
            )
            if workers > 1 and at_once:
                while len(children(pid)) < 2 and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    time.sleep(0.0005)
            else:
                time.sleep(rng.random() * undisturbed[1] * 1.2)
            started = children(pid)
            with suppress(ProcessLookupError):
                os.kill(rng.choice([pid, pid, *started]), signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            told = os.read(said, 4000).decode()
            os.close(said)
            assert status in (0, signal.SIGKILL) or "worker of the build was killed" in told, told
            ended = output.exists() and not folder_of(output).exists()
            kills += status != 0
            several += status != 0 and len(started) > 1
            found += any(folder_of(output).glob("*.part"))
        assert output.read_bytes() == undisturbed[0]
    assert found > 20 and several > 10  # it was killed in the midst, and had something to go on from


def builder(work):
    """A process that does it; its number, and where it says why it failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(1)


def children(pid):
    """Processes that a process has started."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def test_killed_at_every_step_it_is_the_same(few, tmp_path):
    """After each call that changes the disk, from first to last: the next life finds its way, and says the same."""
    output = tmp_path / "c.h5"
    want, steps, late = None, 0, 0
    while True:
        output.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            killed_after(steps)
            run(few, output, unique=True, unit=1500)
            os._exit(0)
        dead = os.waitpid(pid, 0)[1] == signal.SIGKILL
        want = want or run(few, tmp_path / "want.h5", unique=True, unit=1500)
        if dead and output.exists() and not (folder_of(output) / "published").exists():
            late += 1  # there was nothing left to do but to delete an empty folder
            with pytest.raises(DataError, match="is there already"):
                run(few, output, unique=True, unit=1500)
        elif dead:
            assert run(few, output, unique=True, unit=1500) == want
        assert output.read_bytes() == (tmp_path / "want.h5").read_bytes() and not folder_of(output).exists()
        if not dead:
            break
        steps += 1
    assert steps > 30 and late <= 2


def killed_after(steps):
    """Kill this process after its n-th call that changes names on the disk or waits for it."""
    count = 0

    def counted(real):
        def call(*args, **how):
            nonlocal count
            result = real(*args, **how)
            if count == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return result

        return call

    for name in ("mkdir", "fsync", "replace", "unlink", "rmdir", "rename"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_build_that_was_killed_after_its_end_says_so(few, tmp_path, monkeypatch):
    """It has its name already; only the same build may take it for its own."""
    output = tmp_path / "c.h5"

    def killed_after_publishing():
        with monkeypatch.context() as patch:
            patch.setattr("hpctrain.data.workplace._end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                run(few, output)
        assert output.exists() and folder_of(output).exists()

    killed_after_publishing()
    before = output.stat()
    assert run(few, output) == Corpus.open(output).header and not folder_of(output).exists()
    assert output.stat().st_ino == before.st_ino
    with pytest.raises(DataError, match="is there already"):
        run(few, output)
    output.unlink()
    killed_after_publishing()
    with pytest.raises(DataError, match="is there already"):
        run(few, output, unique=True)
    assert not folder_of(output).exists() and output.stat().st_size > 0
    run(few, output, unique=True, replace_existing=True)
    output.unlink()
    killed_after_publishing()
    shutil.copy(output, tmp_path / "copy")
    (tmp_path / "copy").replace(output)  # another file than that which the note is about
    with pytest.raises(DataError, match="is there already"):
        run(few, output)
    output.unlink()
    run(few, output)
    Corpus.open(output).verify()


def test_what_is_done_is_not_done_again(folder, tokenizer, tmp_path, monkeypatch):
    made, real = [], parts.make

    def make(unit, *args):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(unit.key)
        return real(unit, *args)

    monkeypatch.setattr("hpctrain.data.build.make", make)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "c.h5", tokenizer=tokenizer)
    assert len(list(folder_of(tmp_path / "c.h5").glob("*.part"))) == 5
    monkeypatch.setattr("hpctrain.data.build.make", lambda unit, *args: made.append(unit.key) or real(unit, *args))
    run(folder, tmp_path / "c.h5", tokenizer=tokenizer)
    assert len(made) == len(set(made)) > 10 and not folder_of(tmp_path / "c.h5").exists()


def test_parts_of_another_build_are_not_taken(folder, tokenizer, tmp_path):
    """Of another tokenizer, another text, another way of reading."""
    listing = list_sources([folder])
    job = parts.Job(tmp_path)
    plain = parts.units(listing, job, "a", 4000)
    for other in (
        parts.units(listing, job, "b", 4000),
        parts.units(listing, parts.Job(tmp_path, unique=True), "a", 4000),
        parts.units(listing, parts.Job(tmp_path, reading=Reading(prompt="q")), "a", 4000),
    ):
        assert not {u.key for u in plain} & {u.key for u in other}
    assert [u.key for u in plain] == [u.key for u in parts.units(listing, job, "a", 4000)]


def damaged(path, place):
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def stopped_before_it_was_merged(folder, output, monkeypatch, **how):
    """A build of which all parts are done."""
    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.data.build.format.create", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(folder, output, **how)
    return sorted(folder_of(output).glob("*.part"))


def interrupt(*args, **how):
    raise KeyboardInterrupt


@pytest.mark.parametrize("how", [{}, {"unique": True}, {"unique": True, "workers": 2}])
@pytest.mark.parametrize("place", [3, -400, "cut", "gone", "empty"])
def test_a_damaged_part_is_made_again_and_no_other(folder, tokenizer, tmp_path, monkeypatch, how, place):
    """Its tokens, what is known of its documents, or all of it; the result is that of a build that was left alone."""
    how = {**how, "tokenizer": tokenizer, "reading": Reading(prompt=None)}
    run(folder, tmp_path / "want.h5", **how)
    done = stopped_before_it_was_merged(folder, tmp_path / "c.h5", monkeypatch, **how)
    before = {path: path.stat().st_mtime_ns for path in done}
    bad = max(done, key=lambda path: path.stat().st_size)
    if place == "gone":
        bad.unlink()
    elif place in ("cut", "empty"):
        bad.write_bytes(bad.read_bytes()[:-5] if place == "cut" else b"")
    else:
        damaged(bad, place)
    after = {}
    real = format.complete

    def complete(*args):
        after.update({path: path.stat().st_mtime_ns for path in done})
        real(*args)

    monkeypatch.setattr(format, "complete", complete)
    run(folder, tmp_path / "c.h5", **how)
    assert [path for path in done if before[path] != after[path]] == [bad] and len(done) > 10
    assert (tmp_path / "c.h5").read_bytes() == (tmp_path / "want.h5").read_bytes()
    assert not folder_of(tmp_path / "c.h5").exists()


def test_a_disk_that_damages_parts_again_and_again(folder, tmp_path, monkeypatch):
    """One sentence; and what is sound stays."""
    real = Writer.close

    def close(self, part):
        real(self, part)
        damaged(self._path, 3)

    stopped_before_it_was_merged(folder, tmp_path / "c.h5", monkeypatch)
    damaged(next(folder_of(tmp_path / "c.h5").glob("*.part")), 3)
    monkeypatch.setattr(Writer, "close", close)
    with pytest.raises(DataError, match=r"Part .* is damaged, and was so again.*what is done stays in .*\.parts"):
        run(folder, tmp_path / "c.h5")
    monkeypatch.undo()
    run(folder, tmp_path / "c.h5")
    Corpus.open(tmp_path / "c.h5").verify()


def test_sources_that_change_without_a_trace(folder, tmp_path, monkeypatch):
    """Of the same size and time, found when a part is made again."""
    shutil.copytree(folder, tmp_path / "in")
    for part in stopped_before_it_was_merged(tmp_path / "in", tmp_path / "c.h5", monkeypatch):
        damaged(part, 3)
    for n in range(20):
        path = tmp_path / "in" / f"{n}.txt"
        before = path.stat()
        path.write_text("x" + path.read_text()[1:])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="a part that was made twice is not the same"):
        run(tmp_path / "in", tmp_path / "c.h5")


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_that_is_killed_is_told(start, monkeypatch):
    monkeypatch.setattr(pool, "can_fork", lambda: start == "fork")
    with (
        pool.Pool(suicidal(), suicidal, (), 2) as workers,
        pytest.raises(DataError, match=r"worker of the build was killed.*fewer --workers"),
    ):
        list(workers.spread([1, 2, 3], lambda done: None))


def test_a_build_that_loses_a_worker_keeps_what_is_done(folder, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(pool, "can_fork", lambda: True)
    real = parts.make

    def make(unit, *args):
        made.append(unit)
        if len(made) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(unit, *args)

    monkeypatch.setattr("hpctrain.data.build.make", make)
    with pytest.raises(DataError, match=r"was killed.*what is done stays in .*and the same command goes on"):
        run(folder, tmp_path / "c.h5", workers=2)
    assert len(list(folder_of(tmp_path / "c.h5").glob("*.part"))) >= 2
    assert not list(folder_of(tmp_path / "c.h5").glob("*.partial"))


def suicidal():
    return lambda item, progress: os.kill(os.getpid(), signal.SIGKILL)


def test_where_workers_may_be_forked(monkeypatch):
    """Not beside another thread, whose locks stay locked in the child, and not where MPI is."""
    monkeypatch.setattr(pool.threading, "active_count", lambda: 1)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert pool.can_fork()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    assert not pool.can_fork()
    monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    monkeypatch.setattr(pool.threading, "active_count", lambda: 2)
    assert not pool.can_fork()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_end_with_a_builder_that_is_killed(tmp_path, start):
    code = f"""
import os, time
from hpctrain.data import pool
def work(item, progress):
    open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
    time.sleep(60)
def prepare():
    return work
if __name__ == "__main__":
    pool.can_fork = lambda: {start == "fork"}
    with pool.Pool(work, prepare, (), 2) as workers:
        list(workers.spread([1, 2], lambda done: None))
"""
    (tmp_path / "main.py").write_text(code)
    process = subprocess.Popen([sys.executable, tmp_path / "main.py"], env={**os.environ, "PYTHONPATH": os.getcwd()})
    deadline = time.monotonic() + 60
    while (
        len(workers := [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]) < 2
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    process.kill()
    process.wait()
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}/exe") for pid in workers):
        time.sleep(0.01)
    assert len(workers) == 2 and not any(os.path.exists(f"/proc/{pid}/exe") for pid in workers)


def test_ranks_of_mpi_make_the_same_file(folder, tokenizer, tmp_path):
    save(tokenizer, tmp_path / "t.json")
    command = [sys.executable, "-m", "hpctrain", "data", "build"]
    for number in range(3):  # a part is a MiB at least
        (folder / f"{number}.txt").write_text(f"{number} abc\n" * 200_000)
    options = [folder, "--tokenizer", tmp_path / "t.json", "--unique"]
    mpi = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*mpi, *command, tmp_path / "two.h5", *options, "--mpi"], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Built") == 1
    build(
        tmp_path / "one.h5",
        list_sources([folder]),
        [folder],
        tokenizer=tokenizer,
        unique=True,
        suffixes=[],
        order="hash",
    )
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "two.h5").read_bytes()


def test_an_error_of_a_source_keeps_what_is_done_and_says_so(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "in")
    (tmp_path / "in" / "z.jsonl").write_text("no JSON\n")
    listing = list_sources([tmp_path / "in"], order="path")
    output = tmp_path / "c.h5"
    with pytest.raises(DataError, match=r"line 1: is no JSON.*what is done stays in .*and the same command goes on"):
        build(output, listing, [], unit=2000)
    assert len(list(folder_of(output).glob("*.part"))) > 3 and not list(folder_of(output).glob("*.partial"))
    (tmp_path / "in" / "z.jsonl").write_text("{}\n".replace("{}", '{"text": "mended"}'))
    build(output, list_sources([tmp_path / "in"], order="path"), [], unit=2000)
    assert not folder_of(output).exists()


def test_tokenizers_train_alike_and_say_what_they_are(tmp_path, tokenizer):
    again = train_bpe((text(n).encode() for n in range(300)), 300)
    assert again.json == tokenizer.json and again.sha256 == tokenizer.sha256
    assert JsonTokenizer(again.json, "<|endoftext|>").encode("node <|endoftext|> é".encode()).max() < 300
    ids = again.encode(b"node <|endoftext|> shard")
    assert again.end_of_document not in ids.tolist() and again.decode(ids) == "node <|endoftext|> shard"
    with pytest.raises(DataError, match=r"no token '</s>' \(--end\)"):
        JsonTokenizer(again.json, "</s>")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        JsonTokenizer(b"{}")
    with pytest.raises(DataError, match="too small"):
        train_bpe([b"x"], 10)
