"""A driver's library in Python: what ctypes would call, with cards of our choosing."""

from dataclasses import dataclass

NOT_SUPPORTED = 3
NOT_FOUND = 6
MIB = 1 << 20


@dataclass
class FakeCard:
    name: str
    capability: tuple[int, int] | None = None
    total: int | None = None  # MiB
    free: int | None = None
    uuid: str = "GPU-0"
    processes: tuple[tuple[int, int | None], ...] = ()  # process id and MiB


class FakeLibrary:
    """Handles are 1-based numbers, since ctypes makes None of a null pointer."""

    def __init__(self, *cards, driver="580.95.05", cuda=13000, init=0, missing=()):
        self.cards, self.driver, self.cuda, self.init, self.missing = cards, driver, cuda, init, missing
        self.is_open = False

    def __getattr__(self, name):
        if name.startswith("call_") or name in self.__dict__.get("missing", ()):
            raise AttributeError(name)
        return getattr(self, f"call_{name}")

    def card(self, handle):
        assert self.is_open
        return self.cards[handle.value - 1]

    def call_nvmlInit_v2(self):
        self.is_open = self.init == 0
        return self.init

    def call_nvmlShutdown(self):
        self.is_open = False
        return 0

    def call_nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.cards)
        return 0

    def call_nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        if index.value >= len(self.cards):
            return NOT_FOUND
        handle._obj.value = index.value + 1
        return 0

    def call_nvmlDeviceGetHandleByUUID(self, uuid, handle):
        for index, card in enumerate(self.cards):
            if card.uuid.encode() == uuid:
                handle._obj.value = index + 1
                return 0
        return NOT_FOUND

    def call_nvmlDeviceGetMemoryInfo(self, handle, memory):
        card = self.card(handle)
        if card.total is None:
            return NOT_SUPPORTED
        memory._obj.total = card.total * MIB
        memory._obj.free = (card.total if card.free is None else card.free) * MIB
        return 0

    def call_nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, infos):
        processes = self.card(handle).processes
        for info, (pid, used) in zip(infos, processes, strict=False):
            info.pid, info.used = pid, 2**64 - 1 if used is None else used * MIB
        count._obj.value = len(processes)
        return 0

    def call_nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        card = self.card(handle)
        if card.capability is None:
            return NOT_SUPPORTED
        major._obj.value, minor._obj.value = card.capability
        return 0

    def call_nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = self.card(handle).name.encode()
        return 0

    def call_nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = self.card(handle).uuid.encode()
        return 0

    def call_nvmlSystemGetDriverVersion(self, buffer, size):
        assert self.is_open
        buffer.value = self.driver.encode()
        return 0

    def call_nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = self.cuda
        return 0
