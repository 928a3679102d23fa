"""pynvml in place of the real one, with cards of our choosing."""

from dataclasses import dataclass
from types import SimpleNamespace

NOT_SUPPORTED = 3
NOT_FOUND = 6
FUNCTION_NOT_FOUND = 13
MIB = 1 << 20


@dataclass
class FakeCard:
    name: str
    capability: tuple[int, int] | None = None
    total: int | None = None  # MiB
    free: int | None = None
    uuid: str = "GPU-0"
    processes: tuple[tuple[int, int | None], ...] = ()  # process id and MiB


class FakeNVMLError(Exception):
    def __init__(self, value):
        self.value = value


class FakeNvml:
    """Handles are the cards themselves. `missing`: functions that the driver's library is too old for."""

    NVMLError = FakeNVMLError

    def __init__(self, *cards, driver="580.95.05", cuda=13000, init=0, missing=()):
        self.cards, self.driver, self.cuda, self.init = cards, driver, cuda, init
        self.is_open = False
        for name in missing:
            setattr(self, name, self._refuse)

    def _refuse(self, *arguments):
        raise FakeNVMLError(FUNCTION_NOT_FOUND)

    def _known(self, value, code=NOT_SUPPORTED):
        assert self.is_open
        if value is None:
            raise FakeNVMLError(code)
        return value

    def nvmlInit(self):
        if self.init:
            raise FakeNVMLError(self.init)
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return self._known(len(self.cards))

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._known(self.cards[index] if index < len(self.cards) else None, NOT_FOUND)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._known(next((card for card in self.cards if card.uuid == uuid), None), NOT_FOUND)

    def nvmlDeviceGetMemoryInfo(self, card):
        total = self._known(card.total)
        free = total if card.free is None else card.free
        return SimpleNamespace(total=total * MIB, free=free * MIB)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=None if used is None else used * MIB)
            for pid, used in self._known(card.processes)
        ]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, card):
        return self._known([])

    nvmlDeviceGetComputeRunningProcesses_v2 = nvmlDeviceGetGraphicsRunningProcesses_v2 = _refuse

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return self._known(card.capability)

    def nvmlDeviceGetName(self, card):
        return self._known(card.name)

    def nvmlDeviceGetUUID(self, card):
        return self._known(card.uuid)

    def nvmlSystemGetDriverVersion(self):
        return self._known(self.driver)

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self._known(self.cuda)
