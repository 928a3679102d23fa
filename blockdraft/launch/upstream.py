"""A supervised engine as a proxy in front of it sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blockdraft.launch.order import HOST
from blockdraft.launch.supervisor import Launch, Supervisor


class UpstreamEngine(Supervisor):
    """The engine behind a proxy; `facts` is what the live page shows of it, beside what it says itself."""

    def __init__(
        self,
        launch: Launch,
        facts: Mapping[str, object],
        report: Callable[[str], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.url = f"http://{HOST}:{launch.command.port}"
        self._facts = facts
        super().__init__(launch, report, on_line)

    def info(self) -> dict[str, object] | None:
        """None before it is ready, and where its API is on another machine."""
        if not self.is_ready or self.launch.head_address is not None:
            return None
        engine = f"{self.title} {self.versions()['version']}"
        return {"engine": engine, **self._facts, "max_context": self.max_context}

    def versions(self) -> dict[str, str]:
        command = self.launch.command
        return {"version": self.version or command.version, "engine": command.engine}
