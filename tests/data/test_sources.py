"""Which files, in which order."""

import os

import pytest

from hpctrain.data.sources import list_sources
from hpctrain.errors import DataError


def tree(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def names(listing):
    return [s.name for s in listing.sources]


def test_path_order_is_that_of_arguments_then_names(tmp_path):
    root = tree(tmp_path / "x", ["b.py", "a.py", "d/c.py"])
    single = tree(tmp_path, ["z.txt"]) / "z.txt"
    assert names(list_sources([single, root], order="path")) == ["z.txt", "a.py", "b.py", "d/c.py"]


def test_hash_order_depends_on_names_alone(tmp_path):
    files = [f"d{i % 3}/f{i}.txt" for i in range(40)]
    one = names(list_sources([tree(tmp_path / "one", files)]))
    other = names(list_sources([tree(tmp_path / "elsewhere" / "other", reversed(files))]))
    assert one == other and sorted(one) == sorted(files) and one != sorted(one)
    both = [tmp_path / "one" / f"d{i}" for i in range(3)]
    assert names(list_sources(both)) == names(list_sources(both[::-1]))


def test_suffixes_filter_directories_but_not_files_that_are_named(tmp_path):
    root = tree(tmp_path, ["a.py", "b.md", "c.txt"])
    assert names(list_sources([root], [".py", ".md"], "path")) == ["a.py", "b.md"]
    assert names(list_sources([root / "c.txt"], [".py"])) == ["c.txt"]


def test_hidden_excluded_and_empty_files_are_left_out(tmp_path):
    root = tree(tmp_path, ["a", ".git/objects", ".hidden", "site-packages/x", "sub/site-packages/y", "sub/b"])
    (root / "empty").touch()
    listing = list_sources([root], order="path", excluded=("site-packages",))
    assert names(listing) == ["a", "sub/b"] and listing.empty == 1 and listing.bytes == len("a" + "sub/b")


def test_links_to_directories_pipes_and_dangling_links_are_left_out(tmp_path):
    root = tree(tmp_path / "r", ["a"])
    (root / "loop").symlink_to(root)
    (root / "gone").symlink_to(root / "nowhere")
    (root / "file").symlink_to(root / "a")
    os.mkfifo(root / "pipe")
    assert names(list_sources([root], order="path")) == ["a", "file"]


def test_the_output_is_no_source_of_itself(tmp_path):
    root = tree(tmp_path, ["a", "corpus.h5"])
    assert names(list_sources([root], output=root / "corpus.h5")) == ["a"]


def test_listing_hash_follows_names_sizes_and_order(tmp_path):
    root = tree(tmp_path, ["a", "b", "c"])
    first = list_sources([root]).sha256
    assert list_sources([root]).sha256 == first != list_sources([root], order="path").sha256
    (root / "a").write_text("longer")
    assert list_sources([root]).sha256 != first


def test_missing_source(tmp_path):
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file.*leave it out"):
        list_sources([tmp_path / "nowhere"])


def test_source_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a directory"):
        list_sources([tmp_path / "pipe"])


def test_directory_that_may_not_be_read(tmp_path, monkeypatch):
    root = tree(tmp_path, ["a", "d/b"])

    def walk(path, onerror):
        onerror(PermissionError(13, "Permission denied", str(root / "d")))
        return iter(())

    monkeypatch.setattr("hpctrain.data.sources.os.walk", walk)
    with pytest.raises(DataError, match="d cannot be read: Permission denied"):
        list_sources([root])


def test_nothing_to_build_from(tmp_path):
    root = tree(tmp_path, ["a.txt"])
    with pytest.raises(DataError, match=r"no files ending in \.py or \.md that are not empty"):
        list_sources([root], [".py", ".md"])
    (root / "a.txt").write_text("")
    with pytest.raises(DataError, match="no files that are not empty"):
        list_sources([root])
