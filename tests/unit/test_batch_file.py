"""Batch runs over files: nothing lost, nothing twice, whatever happens in between."""

from __future__ import annotations

import json
import os
import resource
import signal
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, answer

from deepinfer_core.engine.batch_file import BatchError, BatchRun, KeySet, ResultFile, digest, lines_of, open_batch
from deepinfer_core.errors import EngineError


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, *lines: Any) -> None:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(files: tuple[Path, Path], engine: Any = None, resume: bool = False, **options: Any) -> BatchRun:
    total, results = open_batch(*files, resume)
    with results:
        batch = BatchRun(files[0], results, engine or FakeEngine(), **options)
        batch.progress.total = total
        batch.run()
    return batch


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"id-{i}", "prompt": f"prompt {i}"} for i in range(count)]


def test_every_line_gets_one_result_under_its_id(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(20), {"prompt": "without id"})
    batch = run(files, max_in_flight=7)
    found = {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in records(files[1])}
    assert found == {**{f"id-{i}": answer(f"id-{i}", f"prompt {i}") for i in range(20)}, "line-21": answer("line-21", "without id")}
    assert list(found) != sorted(found, key=list(found).index, reverse=True)
    assert (batch.progress.done, batch.progress.failed, batch.progress.total, batch.progress.tokens) == (21, 0, 21, 21 * 8)
    assert batch.target.most_in_flight == 7  # type: ignore[attr-defined]


def test_bad_lines_become_records_with_their_number_and_the_rest_runs(files: tuple[Path, Path]) -> None:
    write(
        files[0],
        {"custom_id": "good", "prompt": "a"},
        b"{broken",
        b"",
        {"custom_id": "typo", "prompt": "b", "temperatur": 1},
        {"custom_id": "refused", "prompt": "refuse"},
        {"custom_id": "nan", "prompt": "fail"},
        {"custom_id": "long", "prompt": "long"},
        {"custom_id": 7, "prompt": "x"},
    )
    batch = run(files)
    errors = {record["custom_id"]: record["error"] for record in records(files[1])}
    assert set(errors) == {"good", "line-2", "typo", "refused", "nan", "long", "line-8"}
    assert errors["good"] is None
    assert (errors["line-2"]["line"], errors["line-2"]["code"]) == (2, "invalid_line")
    assert "line 2: not JSON" in errors["line-2"]["message"]
    assert (errors["typo"]["line"], errors["typo"]["param"], errors["typo"]["code"]) == (4, "temperatur", "invalid_request")
    assert errors["refused"]["message"] == "line 5: prompt: refused"
    assert errors["nan"] == {"code": "error", "message": "NaN in the logits", "param": None}
    assert errors["long"]["code"] == "prompt_length_exceeded"
    assert "custom_id" in errors["line-8"]["message"]
    assert (batch.progress.done, batch.progress.failed) == (7, 6)


def test_duplicate_ids_are_refused_before_anything_runs(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(3), b"junk", {"custom_id": "id-1", "prompt": "again"})
    with pytest.raises(BatchError, match="custom_id 'id-1' is on line 2 and on line 5") as caught:
        run(files)
    assert caught.value.exit_code == 2
    assert not files[1].exists()
    write(files[0], {"prompt": "x"}, {"custom_id": "line-1", "prompt": "y"})
    with pytest.raises(BatchError, match="'line-1' is on line 1 and on line 2"):
        run(files)


def test_resume_runs_only_what_is_missing(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(6), b"broken")
    write(files[1], {"custom_id": "id-2", "response": {}, "error": None}, {"custom_id": "line-7", "response": None, "error": {}})
    before = files[1].read_bytes()
    batch = run(files, resume=True)
    assert files[1].read_bytes().startswith(before)
    assert Counter(r["custom_id"] for r in records(files[1])) == Counter([*(f"id-{i}" for i in range(6)), "line-7"])
    assert "id-2" not in batch.target.submitted  # type: ignore[attr-defined]
    assert (batch.progress.skipped, batch.progress.done, batch.progress.failed) == (2, 5, 1)
    again = run(files, resume=True)
    assert (again.progress.skipped, again.progress.done, again.progress.failed) == (7, 0, 1)


def test_a_torn_last_line_is_cut_off_and_run_again(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(4))
    run(files)
    whole = files[1].read_bytes()
    for cut in (1, 10, len(whole.splitlines(keepends=True)[-1]) - 1):
        files[1].write_bytes(whole[:-cut])
        run(files, resume=True)
        assert Counter(r["custom_id"] for r in records(files[1])) == Counter(f"id-{i}" for i in range(4))


def test_resume_refuses_a_file_that_is_no_output(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(2))
    write(files[1], {"custom_id": "id-0", "response": {}, "error": None}, {"something": "else"})
    before = files[1].read_bytes()
    with pytest.raises(BatchError, match="line 2 is no result line"):
        run(files, resume=True)
    assert files[1].read_bytes() == before


def test_an_output_with_results_is_refused_without_resume(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(2))
    write(files[1], {"custom_id": "id-0", "response": {}, "error": None})
    with pytest.raises(BatchError, match="already holds results; continue it with --resume") as caught:
        run(files)
    assert caught.value.exit_code == 2
    files[1].write_bytes(b"")
    run(files)
    assert len(records(files[1])) == 2


def test_files_that_cannot_work(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="does not exist"):
        run(files)
    write(files[0], *prompts(1))
    with pytest.raises(BatchError, match="is the input itself"):
        open_batch(files[0], files[0])
    with pytest.raises(BatchError, match=r"cannot be written .No such file"):
        open_batch(files[0], tmp_path / "missing" / "out.jsonl")
    with pytest.raises(BatchError, match=r"cannot be written .Is a directory"):
        open_batch(files[0], tmp_path)
    with pytest.raises(BatchError, match="is no file"):
        open_batch(tmp_path, files[1])


def test_two_writers_are_refused(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(1))
    with ResultFile(files[1]), pytest.raises(BatchError, match="another process is writing it"):
        run(files, resume=True)


def test_a_full_disk_is_one_clear_error(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(2))
    with pytest.raises(BatchError, match=r"No space left on device.*--resume"):
        run((files[0], Path("/dev/full")))


def child(files: tuple[Path, Path], engine: FakeEngine, limit: int | None = None) -> tuple[int, str]:
    """Runs the batch in a process of its own, resuming: its exit code (negative: signal) and its error message."""
    message = files[1].with_suffix(".message")
    message.write_text("")
    process = os.fork()  # the child uses no torch, whose threads do not survive a fork
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), message.read_text()
    code = 70
    try:
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        run(files, engine, resume=True, max_in_flight=8)
        code = 0
    except BatchError as error:
        message.write_text(str(error))
        code = error.exit_code
    finally:
        os._exit(code)


def test_a_disk_that_fills_up_leaves_whole_lines(files: tuple[Path, Path]) -> None:
    """A limit on the file size makes a write stop in the middle of a line, as a full disk does."""
    write(files[0], *prompts(40))
    code, message = child(files, FakeEngine(), limit=5000)
    assert code == 1
    assert "cannot write a result (File too large). All earlier results are intact" in message
    assert files[1].read_bytes().endswith(b"\n")
    assert 0 < len(records(files[1])) < 40
    run(files, resume=True)
    assert Counter(r["custom_id"] for r in records(files[1])) == Counter(f"id-{i}" for i in range(40))


class Killed(FakeEngine):
    """Kills its process at a given poll, every other time with half a line just written."""

    def __init__(self, at: int, output: Path, torn: bool) -> None:
        super().__init__()
        self.at, self.output, self.torn = at, output, torn

    def poll(self) -> list[Any]:
        if self.polls == self.at:
            if self.torn:
                with self.output.open("ab") as file:
                    file.write(b'{"custom_id":"id-5')
            os.kill(os.getpid(), signal.SIGKILL)
        return super().poll()


def test_kill_minus_nine_again_and_again_loses_and_repeats_nothing(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(60))
    for attempt in range(8):
        code, _ = child(files, Killed(3 + attempt, files[1], torn=attempt % 2 == 1))
        assert code == -signal.SIGKILL
    assert child(files, FakeEngine())[0] == 0
    found = {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in records(files[1])}
    assert len(records(files[1])) == len(found) == 60
    assert found == {f"id-{i}": answer(f"id-{i}", f"prompt {i}") for i in range(60)}


def test_stopping_keeps_what_is_done(files: tuple[Path, Path]) -> None:
    write(files[0], *prompts(30))
    engine = FakeEngine()
    batch = run(files, engine, max_in_flight=4, stop=lambda: engine.polls >= 10)
    assert batch.progress.stopped
    assert len(records(files[1])) == batch.progress.done == 10
    assert not run(files, resume=True).progress.stopped
    assert len(records(files[1])) == 30


@pytest.mark.parametrize("die_after", [0, 3, 19])
def test_requests_that_went_down_with_the_engine_are_left_for_resume(files: tuple[Path, Path], die_after: int) -> None:
    write(files[0], *prompts(20))
    with pytest.raises(EngineError, match="device lost"):
        run(files, FakeEngine(die_after=die_after), max_in_flight=5)
    assert len(records(files[1])) == die_after
    assert all(record["error"] is None for record in records(files[1]))
    run(files, resume=True)
    assert Counter(r["custom_id"] for r in records(files[1])) == Counter(f"id-{i}" for i in range(20))


def test_lines_are_read_one_at_a_time_with_any_line_end(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files[0].write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": 2}\n' + b"x" * 100 + b'\n{"c": 3}')
    monkeypatch.setattr("deepinfer_core.engine.batch_file.MAX_LINE", 40)
    found = list(lines_of(files[0]))
    assert [(number, len(line)) for number, line in found] == [(1, 8), (4, 8), (5, 41), (6, 8)]
    batch = run(files)
    assert batch.progress.total == 4
    assert "longer than 40 bytes" in next(r["error"]["message"] for r in records(files[1]) if r["custom_id"] == "line-5")


def test_memory_does_not_grow_with_the_file(files: tuple[Path, Path]) -> None:
    with files[0].open("w") as file:
        for i in range(3000):
            file.write(json.dumps({"custom_id": f"id-{i}", "prompt": "x" * 2000}) + "\n")
    tracemalloc.start()
    batch = run(files, max_in_flight=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.progress.done == 3000
    assert peak < 3_000_000, "6 MB of requests were held at once"


def test_key_set() -> None:
    keys = [f"key {i}" for i in range(1000)]
    found = KeySet(b"".join(digest(key) for key in keys))
    assert all(key in found for key in keys)
    assert not any(f"other {i}" in found for i in range(1000))
    assert found.repeated() is None
    assert "x" not in KeySet(b"")
    assert KeySet(b"").repeated() is None
    assert KeySet(b"".join(digest(key) for key in [*keys, "key 500", "key 3"])).repeated() == (500, 1000)


def test_results_reach_the_disk_every_few_lines(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(len(files[1].read_bytes().splitlines())))
    with ResultFile(files[1], sync_lines=3, sync_seconds=1e9) as results:
        for i in range(7):
            results.append({"custom_id": str(i), "error": None})
    assert calls == [3, 6, 7]
