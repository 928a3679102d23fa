"""Engines at the other end of connections, in threads instead of processes."""

import contextlib
import os
import socket
import threading
from multiprocessing import Pipe

from blockdraft.phases import StartProgress
from blockdraft.server.engine_link.engine_worker import run_engine
from blockdraft.server.engine_link.replica import ReplicaPlace
from blockdraft.server.engine_link.replicas import Replicas

PATIENCE_S = 60


class ThreadChild:
    """A thread in the place of the process."""

    def __init__(self, connection, make_engine, step_timeout_s):
        self._connection = connection
        self.exitcode = 0
        self.pid = None
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

    def close(self):
        pass


@contextlib.contextmanager
def remote_engines(
    *make_engines,
    on_hang=lambda engines: None,
    step_timeout_s=PATIENCE_S,
    waits=True,
    device="cpu",
    on_start=lambda place, neighbours: None,
):
    """Replicas in threads. `make_engine` gets the progress of the start; all first starts are waited for.

    One that is lost is started again in a thread, too, by its own `make_engine`. On a card, only the first
    one has been started at the beginning.
    """

    def child_of(make_engine):
        ours, theirs = Pipe()

        def make(startup, on_tokenizer):
            engine = make_engine(startup)
            on_tokenizer(engine.models.tokenizer)
            return engine

        return ours, ThreadChild(theirs, make, step_timeout_s)

    def start(place, neighbours):
        on_start(place, neighbours)
        return child_of(place.work)

    places = [ReplicaPlace(device, make_engine) for make_engine in make_engines]
    first = make_engines if device == "cpu" else make_engines[:1]
    children = {index: child_of(make_engine) for index, make_engine in enumerate(first)}
    replicas = Replicas(
        places,
        children,
        StartProgress(),
        on_hang,
        step_timeout_s=step_timeout_s,
        start=start,
    )
    ended = threading.Event()
    while waits and any(one["state"] == "starting" for one in replicas.status()) and not ended.wait(0.005):
        if replicas.error is not None:
            break
    try:
        yield replicas
    finally:
        replicas.close()


def remote_engine(make_engine, on_hang=lambda engine: None, step_timeout_s=PATIENCE_S):
    """The only replica of a server."""
    return remote_engines(make_engine, on_hang=on_hang, step_timeout_s=step_timeout_s)
