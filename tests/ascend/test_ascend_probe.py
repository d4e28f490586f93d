"""Why an Ascend 950 cannot be used here, in words. Needs neither torch_npu nor a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepinfer_backends.ascend950 import environment
from deepinfer_backends.ascend950.backend import AscendBackend
from deepinfer_backends.ascend950.environment import Check
from deepinfer_core.backend import Numerics
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import BackendError


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    monkeypatch.setattr(environment, "installed_version", lambda name: versions.get(name.replace("-", "_")))


def test_missing_wheel_is_named_with_the_extra_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.13.0")
    (reason,) = AscendBackend().probe().reasons
    assert "torch-npu is not installed" in reason
    assert "deepinfer-core[ascend950]" in reason


def test_wheel_for_another_torch_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.11.0+cpu", torch_npu="2.13.0")
    (reason,) = AscendBackend().probe().reasons
    assert "torch 2.11.0+cpu and torch-npu 2.13.0 do not belong together" in reason
    assert "install torch 2.13.*" in reason


def test_missing_cann_is_named_with_its_setup_script(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.13.0", torch_npu="2.13.0")
    monkeypatch.setattr(environment, "_LIBRARIES", ("libascendcl_that_is_not_there.so",))
    (reason,) = AscendBackend().probe().reasons
    assert "CANN library libascendcl_that_is_not_there.so does not load" in reason
    assert "set_env.sh" in reason


@pytest.mark.parametrize(("name", "family"), [("Ascend910B4", "Atlas A2"), ("Ascend910_9392", "Atlas A3"), ("Ascend310P3", "")])
def test_other_npus_are_refused_with_what_they_lack(name: str, family: str) -> None:
    check = environment.judge_soc(name)
    assert name in check.problem
    assert family in check.problem
    assert "no MX" in check.problem


def test_a_950_is_accepted() -> None:
    assert environment.judge_soc("Ascend950PR_9579") == Check("device", "Ascend950PR_9579")


def test_checks_stop_at_the_first_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.13.0")
    assert [check.name for check in environment.checks()] == ["torch_npu wheel"]


@pytest.mark.parametrize("device", ["cuda:0", "npu:x", "no_such_device:7"])
def test_other_devices_are_refused_by_name(device: str) -> None:
    for build in (AscendBackend().kernels, AscendBackend().runtime):
        with pytest.raises(BackendError, match=f"has no device '{device}'"):
            build(device)


def test_kernels_and_runtime_say_why_they_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.13.0")
    for build in (AscendBackend().kernels, AscendBackend().runtime):
        with pytest.raises(BackendError, match="'ascend950' is not available here: torch-npu is not installed"):
            build("")


def test_defaults_keep_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HCCL_BUFFSIZE", "512")
    in_force = environment.apply_defaults()
    assert in_force["HCCL_BUFFSIZE"] == "512"
    assert in_force["TASK_QUEUE_ENABLE"] == "0"
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name)


def test_discovery_and_probing_import_no_vendor_library() -> None:
    program = (
        "import sys; from deepinfer_backends.ascend950.plugin import deepinfer_backends as found; backend = found()[0]();"
        "assert not {'torch', 'torch_npu'} & set(sys.modules); backend.capabilities(); backend.probe();"
        "assert 'torch_npu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def test_unclaimed_features() -> None:
    claims = AscendBackend().capabilities()
    assert not claims.batch_invariant
    assert not claims.deterministic_sampling
    assert claims.numerics == {Numerics.RELEASE}
    assert claims.tested_on == ()


def test_a_config_that_asks_for_unclaimed_features_is_refused_with_the_backends_that_have_them() -> None:
    from deepinfer_core.backend.registry import Selected, discover
    from deepinfer_core.backend.requirements import check_requirements

    registry = discover()
    found = registry.find("ascend950")
    config = EngineConfig.model_validate({"determinism": {"batch_invariant": True, "deterministic_sampling": True}})
    selected = Selected(found.backend(), found.origin, found.probe(), "test")
    with pytest.raises(BackendError, match=r"determinism\.batch_invariant") as caught:
        check_requirements(config, selected, registry)
    assert "deterministic_sampling" in str(caught.value)
    assert "cpu_ref" in str(caught.value)
