"""The CPU as a device: order, overlap, errors, guards, memory figures."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from deepinfer_backends.cpu_ref.runtime import CpuRuntime, host_memory
from deepinfer_core.backend.registry import get_backend
from deepinfer_core.errors import BackendError, EngineError


@pytest.fixture(params=["worker", "inline"])
def runtime(request):
    runtime = CpuRuntime(inline=request.param == "inline")
    yield runtime
    runtime.close()


@pytest.fixture
def worker():
    runtime = get_backend("cpu_ref").runtime("")
    yield runtime
    runtime.close()


def test_work_runs_in_order(runtime):
    state = torch.zeros(1, dtype=torch.int64)
    pending = [runtime.submit(lambda i=i: {"x": state.mul_(10).add_(i)}) for i in range(1, 6)]
    assert [int(p.wait()["x"][0]) for p in pending] == [1, 12, 123, 1234, 12345]


def test_host_arrays_may_be_reused_at_once(runtime):
    array, out = np.arange(4), torch.zeros(4, dtype=torch.int64)
    copy = runtime.to_device(array)
    assert runtime.to_device(array, out) is out
    array[:] = -1
    runtime.synchronize()
    assert copy.tolist() == out.tolist() == [0, 1, 2, 3]


def test_copies_to_the_host_survive_later_work(runtime):
    x = torch.ones(2)
    before = runtime.to_host({"x": x})
    after = runtime.submit(lambda: {"x": x.zero_()})
    assert before.wait()["x"].tolist() == [1, 1]
    assert after.wait()["x"].tolist() == [0, 0]


def test_work_records_no_gradients(runtime):
    weight = torch.ones(2, requires_grad=True)
    assert runtime.submit(lambda: {"x": weight * 2}).wait()["x"].tolist() == [2, 2]


def test_the_worker_overlaps_the_host(worker):
    gate = threading.Event()
    first = worker.submit(lambda: gate.wait() and {"x": torch.ones(1)})
    event = worker.record()
    assert not first.done()
    assert not event.done()
    gate.set()
    event.wait()
    assert first.done()
    assert event.done()


def test_copies_into_buffers_wait_for_the_work_before_them(worker):
    gate, buffer = threading.Event(), torch.zeros(1)
    first = worker.submit(lambda: gate.wait() and {"x": buffer})
    worker.to_device(np.ones(1, dtype=np.float32), buffer)
    gate.set()
    assert first.wait()["x"].tolist() == [0]
    worker.synchronize()
    assert buffer.tolist() == [1]


def test_work_may_enqueue_work(runtime):
    def outer():
        runtime.to_device(np.ones(1, dtype=np.float32), buffer)
        return {"x": buffer}

    buffer = torch.zeros(1)
    assert runtime.submit(outer).wait()["x"].tolist() == [1]


def test_errors_reach_the_wait_and_the_next_event_and_later_work_runs(runtime):
    def failing():
        raise MemoryError("too big")

    broken = runtime.submit(failing)
    later = runtime.submit(lambda: {"x": torch.ones(1)})
    event = runtime.record()
    with pytest.raises(MemoryError, match="too big"):
        broken.wait()
    with pytest.raises(MemoryError, match="too big"):
        event.wait()
    assert later.wait()["x"].tolist() == [1]
    runtime.synchronize()


def test_forbidden_waits_raise_whether_or_not_they_would_block(runtime):
    pending, event = runtime.submit(dict), runtime.record()
    event.wait()
    with runtime.forbid_sync():
        for wait in (pending.wait, event.wait, runtime.synchronize):
            with pytest.raises(EngineError, match=r"inside forbid_sync.*may not wait for the device"):
                wait()
        runtime.submit(dict)
    assert pending.wait() == {}


def test_a_captured_graph_runs_its_work_again_in_order(runtime):
    seen = []
    graph = runtime.capture(lambda: seen.append(len(seen)))
    assert seen == [0]
    graph.replay()
    runtime.submit(lambda: seen.append("after") or {}).wait()
    assert seen == [0, 1, "after"]


def test_events_tell_the_time_between_them(runtime):
    first, second = runtime.record(), runtime.record()
    second.wait()
    assert 0 <= second.milliseconds_since(first) < 60_000


def test_an_event_does_not_keep_the_work_before_it(runtime):
    class Step:
        """What work closes over; a step also keeps its events, so that a chain of all steps would live."""

    step = Step()
    alive = weakref.ref(step)
    runtime.submit(lambda kept=step: {"x": torch.zeros(1)} if kept else {}).wait()
    event = runtime.record()
    event.wait()
    del step
    gc.collect()
    assert alive() is None
    assert event.done()


def test_closed_and_foreign_devices_are_refused(runtime):
    with pytest.raises(BackendError, match=r"no runtime for device 'cuda:0'.*set backend.device"):
        CpuRuntime("cuda:0")
    runtime.close()
    runtime.close()
    with pytest.raises(EngineError, match="was closed"):
        runtime.record()


def write(root, name, text):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def test_memory_of_the_machine(runtime, tmp_path):
    info = runtime.memory()
    assert 0 < info.available <= info.total
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    7 kB\n")
    assert host_memory(tmp_path).available == 7 * 1024


@pytest.mark.parametrize("names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")])
def test_memory_of_a_container(tmp_path, names):
    write(tmp_path, f"sys/fs/cgroup/{names[0]}", "1000000\n")
    write(tmp_path, f"sys/fs/cgroup/{names[1]}", "400000\n")
    assert (host_memory(tmp_path).total, host_memory(tmp_path).available) == (1000000, 600000)
    write(tmp_path, f"sys/fs/cgroup/{names[0]}", "max\n")
    assert host_memory(tmp_path).total > 1000000
