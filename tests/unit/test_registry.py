"""Discovery, reports of broken plugins, selection, requirements and op origins, with real distributions in a temporary folder."""

import importlib
import re
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from deepinfer_core.backend import Capabilities, Numerics
from deepinfer_core.backend.kernels import OPS, KernelContractError, Kernels
from deepinfer_core.backend.ops import backend_ops, op_table, refuse_inherited
from deepinfer_core.backend.registry import Selected, discover, discover_in, get_backend
from deepinfer_core.backend.requirements import check_requirements
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import BackendError

HEAD = """
from deepinfer_core.backend import API_VERSION, Backend, Capabilities, Numerics, Probe
from deepinfer_core.backend.hookspecs import hookimpl

class Foreign(Backend):
    api_version = API_VERSION
    name = "{name}"
    def probe(self): return Probe(available={available}, reasons=() if {available} else ("Plug the card in.",))
    def capabilities(self): return Capabilities(device_type="{device}")
    def kernels(self, device, numerics=Numerics.RELEASE): raise RuntimeError("no card")
    def runtime(self, device): raise RuntimeError("no card")

@hookimpl
def deepinfer_backends():
    return [Foreign]
"""


def source(name="acme", available=True, device="acme"):
    return HEAD.format(name=name, available=available, device=device)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with one entry point, and returns the registry of it and this project, whatever else is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    others = {entry.name for entry in entry_points(group="deepinfer") if entry.dist.name != "deepinfer-core"}
    modules = []

    def _install(code: str, distribution: str = "acme-backend"):
        module = distribution.replace("-", "_") + "_plugin"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        info = tmp_path / f"{distribution.replace('-', '_')}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[deepinfer]\n{distribution} = {module}\n", encoding="utf-8")
        importlib.invalidate_caches()
        return discover_in([entry for entry in entry_points(group="deepinfer") if entry.name not in others])

    yield _install
    for module in modules:
        sys.modules.pop(module, None)


def only_problem(registry):
    (problem,) = registry.problems
    assert problem.distribution == "acme-backend"
    assert {"cpu_ref", "cuda_sm100", "ascend950"} <= set(registry.backends)
    return problem


def test_our_backends_come_through_the_entry_points():
    registry = discover()
    assert set(registry.backends) >= {"cpu_ref", "cuda_sm100", "ascend950"}
    assert registry.problems == []
    assert registry.find("cpu_ref").origin.distribution == "deepinfer-core"


def test_hook_deepinfer_backends(install):
    registry = install(source())
    assert registry.problems == []
    selected = registry.select("acme")
    assert (selected.backend.name, selected.why) == ("acme", "named by the configuration")
    assert str(selected.origin) == "acme-backend 2.0 (entry point 'acme-backend = acme_backend_plugin')"
    assert registry.manager.has_plugin("acme-backend:acme-backend")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_vendor_library", "ModuleNotFoundError: No module named 'no_such_vendor_library'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("x = 1", "implements no hook of DeepInfer"),
        (source().replace("def deepinfer_backends", "def deepinfer_backend"), "unknown hook 'deepinfer_backend'"),
        (source().replace("deepinfer_backends()", "deepinfer_backends(extra)"), "Argument"),
        (source().replace("return [Foreign]", "return 1 / 0"), "ZeroDivisionError"),
        (source().replace("[Foreign]", "[Foreign()]"), "expected subclasses of"),
        (source().replace("[Foreign]", "[type('X', (), {'api_version': API_VERSION})]"), "X is not a subclass of"),
        (source().replace("= API_VERSION", "= 99"), "api_version 99, this core has contract version 1: upgrade deepinfer-core"),
        (source().replace("= API_VERSION", "= 0"), "api_version 0.*upgrade the plugin"),
        (source().replace("def runtime", "def run_time"), "backend 'acme' lacks the methods runtime"),
        (source(name="auto"), "has name 'auto', expected lower-case letters"),
        (source(name="Acme 1"), "has name 'Acme 1', expected lower-case letters"),
    ],
)
def test_broken_plugins_are_reported_and_stop_nothing(install, code, reason):
    registry = install(code)
    problem = only_problem(registry)
    assert re.search(reason, problem.reason)
    assert registry.select().backend.name == "cpu_ref"


def test_a_broken_plugin_keeps_its_traceback_and_its_error_when_selected(install):
    registry = install("import no_such_vendor_library")
    assert "in <module>" in only_problem(registry).traceback
    with pytest.raises(BackendError, match=r"backend 'acme-backend' cannot be used: acme-backend .*no_such_vendor_library"):
        registry.select("acme-backend")


def test_a_backend_of_another_version_names_both_when_selected(install):
    registry = install(source().replace("= API_VERSION", "= 99"))
    with pytest.raises(BackendError, match=r"'acme' cannot be used.*api_version 99.*contract version 1"):
        registry.select("acme")


def test_two_distributions_with_one_name_make_it_unusable(install):
    install(source())
    registry = install(source(), "other-backend")
    assert [problem.distribution for problem in registry.problems] == ["acme-backend", "other-backend"]
    with pytest.raises(BackendError, match=r"'acme' is claimed by acme-backend 2.0 .* and other-backend 2.0 .*: uninstall one"):
        registry.select("acme")
    assert registry.select().backend.name == "cpu_ref"


def test_one_class_registered_twice_is_one_backend(install):
    registry = install(source().replace("[Foreign]", "[Foreign, Foreign]"))
    assert registry.problems == []
    assert "acme" in registry.backends


def test_auto_prefers_accelerators_then_other_cpus_then_the_reference(install):
    registry = install(source("zz_card", device="acme"))
    assert registry.select().backend.name == "zz_card"
    registry = install(source("aa_cpu", device="cpu"), "cpu-backend")
    order = registry.auto_order()
    assert order[-2:] == ["aa_cpu", "cpu_ref"]
    assert order.index("ascend950") < order.index("cuda_sm100") < order.index("zz_card") < order.index("aa_cpu")


def test_an_unavailable_backend_is_refused_with_its_reasons(install):
    registry = install(source(available=False))
    with pytest.raises(BackendError, match=r"'acme' is not available here: Plug the card in\. Available: .*cpu_ref\. Set backend.name"):
        registry.select("acme")
    assert "acme" in registry.select().why


def test_no_backend_at_all():
    with pytest.raises(BackendError, match="no backend is available: `deepinfer backends` says why"):
        discover_in([]).select()


@pytest.mark.parametrize(("method", "step"), [("probe", r"its probe\(\)"), ("capabilities", r"its capabilities\(\)")])
def test_a_method_that_raises_makes_its_backend_unavailable(install, method, step):
    registry = install(source() + f"\ndef broken(self): raise OSError('driver gone')\nForeign.{method} = broken\n")
    with pytest.raises(BackendError, match=f"{step} raised OSError: driver gone; report it to acme-backend"):
        registry.select("acme")
    assert registry.select().backend.name == "cpu_ref"
    assert registry.find("acme").claims().batch_invariant is False


def test_unknown_names_get_the_nearest_valid_one():
    with pytest.raises(BackendError, match=r"unknown backend 'cpu_rf'.*did you mean 'cpu_ref'\?") as caught:
        get_backend("cpu_rf")
    assert caught.value.exit_code == 2
    with pytest.raises(BackendError, match=r"valid: ascend950, auto, cpu_ref, .*cuda_sm100"):
        get_backend("xyz")


def selected(name="cpu_ref") -> Selected:
    return discover().select(name)


def test_requirements_that_are_met():
    config = EngineConfig(
        model={"numerics": "ideal"},
        determinism={"batch_invariant": True, "deterministic_sampling": True},
        cache={"window_format": "bf16", "entry_format": "fp4", "index_format": "fp4_index"},
    )
    check_requirements(config, selected(), discover())


@pytest.mark.parametrize(
    ("settings", "feature"),
    [
        ({"model": {"numerics": "ideal"}}, "model.numerics: ideal; backends that do: cpu_ref"),
        ({"determinism": {"batch_invariant": True}}, "determinism.batch_invariant: true; backends that do: .*cpu_ref"),
        ({"cache": {"index_format": "fp8"}}, "cache.index_format: fp8; backends that do: none"),
        ({"model": {"max_model_len": 9000}}, "sequences of 9001 tokens"),
    ],
)
def test_missing_features_are_refused(install, settings, feature):
    registry = install(source().replace('device_type="acme"', 'device_type="acme", max_context=8000'))
    config = EngineConfig(**{"model": {"max_model_len": 100}, **settings})
    with pytest.raises(BackendError, match=f"backend 'acme' does not offer {feature}"):
        check_requirements(config, registry.select("acme"), registry)


def test_all_missing_features_are_listed(install):
    registry = install(source())
    config = EngineConfig(model={"numerics": "ideal"}, determinism={"batch_invariant": True, "deterministic_sampling": True})
    with pytest.raises(BackendError, match="backend 'acme' has 3 problems"):
        check_requirements(config, registry.select("acme"), registry)


class _Halfway(Kernels):
    """Misses every op but one."""

    def embed(self, ids, table):
        return table[ids]


def test_op_table_of_the_reference_and_of_others(install):
    registry = install(source())
    reference = registry.find("cpu_ref")
    table = backend_ops(reference, registry)
    assert [origin.op for origin in table] == list(OPS)
    assert {origin.status for origin in table} == {"native"}
    base = type(reference.backend().kernels(""))
    mine = type("AcmeKernels", (base,), {"embed": _Halfway.embed, "__module__": "acme_backend_plugin"})
    by_op = {origin.op: origin for origin in op_table(mine, registry.find("acme").backend, registry)}
    assert (by_op["embed"].status, by_op["embed"].owner) == ("native", "acme")
    assert (by_op["moe"].status, by_op["moe"].owner) == ("inherited", "cpu_ref")
    halfway = {origin.op: origin.status for origin in op_table(_Halfway, registry.find("acme").backend, registry)}
    assert (halfway["embed"], halfway["moe"]) == ("native", "missing")
    with pytest.raises(BackendError, match=rf"'acme' inherits {len(OPS) - 1} of {len(OPS)} ops .*backend.native_only is true: set it to"):
        refuse_inherited(mine(None), registry.find("acme").backend, registry)
    refuse_inherited(base(None), reference.backend, registry)


def test_ops_of_kernels_that_break_the_contract_or_cannot_be_built(install):
    registry = install(source())
    with pytest.raises(BackendError, match="ops of backend 'acme' cannot be listed here: RuntimeError: no card"):
        backend_ops(registry.find("acme"), registry)
    found = registry.find("acme")

    def broken_kernels(self, device, numerics=Numerics.RELEASE):
        class Broken(Kernels):
            def embed(self, ids, table):
                return table[ids]

        return Broken

    found.backend.kernels = broken_kernels
    statuses = {origin.op: origin.status for origin in backend_ops(found, registry)}
    assert (statuses["embed"], statuses["moe"]) == ("native", "missing")
    with pytest.raises(KernelContractError, match="op 'moe' is missing"):
        found.backend().kernels("")


def test_the_reference_kernels_are_importable_from_their_package():
    from deepinfer_backends import cpu_ref

    assert type(get_backend("cpu_ref").kernels("")) is cpu_ref.ReferenceKernels
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        cpu_ref.nothing  # noqa: B018


def test_every_hook_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    hooks = vars(discover().manager.hook)
    assert hooks
    assert [name for name in hooks if f"`{name}()`" not in text] == []


def test_careful_defaults_of_claims():
    claims = Capabilities().model_dump()
    assert not any(claims[flag] for flag in ("batch_invariant", "deterministic_sampling", "graph_capture", "async_copy"))
