"""`Backend`: what a hardware vendor implements, and the version of the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from deepinfer_core.backend.capabilities import Capabilities, Probe
from deepinfer_core.backend.formats import Numerics

if TYPE_CHECKING:
    from deepinfer_core.backend.collectives import Collectives, Group
    from deepinfer_core.backend.kernels import Kernels
    from deepinfer_core.backend.runtime import DeviceRuntime

API_VERSION = 1
"""Version of the contract in this package. It grows when an existing backend would stop working."""


class Backend(ABC):
    """One kind of hardware. Instances are cheap: nothing heavy is imported before `kernels` or `runtime` is called."""

    api_version: ClassVar[int]  # contract version the backend was written for; checked before anything else is called
    name: ClassVar[str]  # the config value that selects it

    @abstractmethod
    def probe(self) -> Probe:
        """Whether the backend can run here. Never raises; imports vendor libraries only when called."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The backend's claims. Needs no device."""

    @abstractmethod
    def kernels(self, device: str, numerics: Numerics = Numerics.RELEASE, batch_invariant: bool = False) -> Kernels:
        """The ops on `device` (a torch device string, or "" for the backend's default).

        `batch_invariant`: every row must be bitwise independent of the other rows, whatever it costs. Asked only of a backend that claims
        it; one that always is may ignore the wish.
        """

    @abstractmethod
    def runtime(self, device: str) -> DeviceRuntime:
        """The runtime of `device` ("" for the default)."""

    def emulated(self) -> Backend | None:
        """(optional) This backend's own kernels with its device's operators emulated on the CPU; None, the default, if it has no such
        thing. The result is a backend of another name that says so: what passes on it has not passed on a device."""
        return None

    def collectives(self, group: Group) -> Collectives:
        """(optional) Communication over `group`; by default torch.distributed with the first backend that `capabilities` names."""
        from deepinfer_core.backend.collectives import default_collectives

        return default_collectives(group, self.capabilities())
