"""An engine at the other end of a connection, in a thread instead of a process."""

import contextlib
import os
import socket
import threading
from multiprocessing import Pipe

from blockdraft.phases import StartProgress
from blockdraft.server.engine_link.engine_worker import run_engine
from blockdraft.server.engine_link.remote_engine import RemoteEngine

PATIENCE_S = 60


class ThreadChild:
    """A thread in the place of the process."""

    def __init__(self, connection, make_engine, step_timeout_s):
        self._connection = connection
        self.exitcode = 0
        self._thread = threading.Thread(target=self._run, args=(make_engine, step_timeout_s), daemon=True)
        self._thread.start()

    def _run(self, make_engine, step_timeout_s):
        with contextlib.suppress(OSError):
            run_engine(self._connection, make_engine, StartProgress(), step_timeout_s=step_timeout_s)
        self._connection.close()

    def kill(self):
        self.exitcode = -9
        # It may have just ended, as a process may have.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # closing would not wake whoever reads

    def join(self):
        pass


@contextlib.contextmanager
def remote_engine(make_engine, on_hang=lambda engine: None, step_timeout_s=PATIENCE_S):
    """`make_engine` gets the progress of the start, and is waited for."""
    ours, theirs = Pipe()

    def make(startup, on_tokenizer):
        engine = make_engine(startup)
        on_tokenizer(engine.models.tokenizer)
        return engine

    child = ThreadChild(theirs, make, step_timeout_s)
    engine = RemoteEngine(ours, child, StartProgress(), on_hang, step_timeout_s=step_timeout_s)
    ended = threading.Event()
    while engine.startup.state == "starting" and not ended.wait(0.005):
        pass
    try:
        yield engine
    finally:
        engine.close()
