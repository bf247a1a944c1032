"""Several processes as one run: a roll call before jax starts, a few words on the way, and an end for all together.

    process 0 listens at HOST:PORT, the others connect          roll call: ids, the same options; bounded by PATIENCE
    jax.distributed at HOST:PORT+1                              arrays over the devices of all
    a line of JSON each way, every BEAT seconds at least        tell, agree, any_of

For torch.distributed, ranks.py does the same. Either by itself would abort with a stack trace, or hang inside a
collective, when a process ends. Here a thread of each process watches the connection. Whoever ends tells why, if it
can; a connection that closes, or is silent for SILENCE seconds, is an end too. Then every process says so in one line
and exits with 1.
"""

import contextlib
import json
import os
import queue
import select
import socket
import sys
import threading
import time

from ringtide.models import BadInput

PATIENCE = 60  # seconds, for all to come
BEAT, SILENCE = 5, 45  # seconds
_CURE = "; start all again with --resume"
_LONGEST = 1 << 20  # bytes of a message


class Alone:
    """The only process of its run; has the same methods as Link."""

    first = True
    count = 1

    def tell(self, value=None):
        """What process 0 says, on all."""
        return value

    def agree(self, **values):
        """Refuses to go on where values, that JSON holds, are not the same on all."""

    def any_of(self, flag: bool) -> bool:
        """Whether it is true on any."""
        return flag

    def leave(self):
        """The last call where all went well: all wait for each other."""

    def fail(self, why: str):
        """Ends all processes, saying why; alone, that is left to the caller."""


class Link:
    """One of the processes of a run, connected to process 0, or, that one, to all others."""

    def __init__(self, me: int, count: int, peers: dict, shutdown, quiet: bool = False):
        self.first, self.count, self._shutdown, self._quiet = me == 0, count, shutdown, quiet
        self._peers = peers  # process id -> _Peer
        self._leaving, self._ending = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def tell(self, value=None):
        """What process 0 says, on all."""
        if not self.first:
            return self._peers[0].messages.get()["value"]
        self._send(value=value)
        return value

    def agree(self, **values):
        """Refuses to go on where values, that JSON holds, are not the same on all."""
        if not self.first:
            self._send(value=values)
            self.tell()
            return
        for other, theirs in self._gather().items():
            _compare(values, theirs, other)
        self.tell()

    def any_of(self, flag: bool) -> bool:
        """Whether it is true on any."""
        if not self.first:
            self._send(value=flag)
            return self.tell()
        return self.tell(any([flag, *self._gather().values()]))

    def leave(self):
        """The last call where all went well: all wait for each other."""
        if self.first:
            self._gather()
        else:
            self._send(value="bye")
            self.tell()
        self._leaving.set()
        self._watcher.join()
        if self.first:  # leaves last: the others' framework ends badly without its own
            self._send(value="bye")
            for peer in self._peers.values():
                peer.wait_for_end()
        self._shutdown()
        for peer in self._peers.values():
            peer.socket.close()

    def fail(self, why: str):
        """Ends all processes, saying why."""
        time.sleep(1)  # what failed may be a collective, because another process has ended: then that is said
        self._end(why)

    def _gather(self):
        return {other: peer.messages.get()["value"] for other, peer in self._peers.items()}

    def _send(self, **message):
        for peer in self._peers.values():
            peer.send(message)

    def _watch(self):
        """Reads from all, and ends this process when another one has ended."""
        beat = time.monotonic()
        heard = dict.fromkeys(self._peers, beat)
        while not self._leaving.is_set():
            ready, _, _ = select.select([peer.socket for peer in self._peers.values()], [], [], 1)
            now = time.monotonic()
            if now - beat > BEAT:
                beat = now
                self._send()
            for other, peer in self._peers.items():
                if peer.socket in ready:
                    heard[other] = now
                    try:
                        messages = peer.receive()
                    except (OSError, ValueError):
                        self._lost(f"process {other} has ended{_CURE}")
                        continue
                    for message in messages:
                        if "error" in message:
                            self._lost(f"process {other}: {message['error']}" if self.first else message["error"])
                        if "value" in message:
                            peer.messages.put(message)
                elif now - heard[other] > SILENCE:
                    self._lost(f"process {other} has been silent for {SILENCE} s{_CURE}")

    def _lost(self, why):
        if not self._leaving.is_set():
            self._end(why)

    def _end(self, why):
        self._ending.acquire()  # for ever: one end, one line
        self._send(error=why)  # also what another said: each is connected to process 0 only
        if not self._quiet:
            sys.stderr.write(f"\nError: {why}\n")
            sys.stderr.flush()
        time.sleep(1 if self.first else 0)  # the others hear it before jax's coordinator goes with this process
        os._exit(1)  # the main thread may sit in a collective that will never return


class _Peer:
    """A connection: lines of JSON."""

    def __init__(self, connection):
        self.socket, self.messages = connection, queue.Queue()
        self._rest, self._lock = b"", threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict):
        with self._lock, contextlib.suppress(OSError):  # that it has gone, the reader sees
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """What has come, whole messages. Raises OSError when the other has gone, ValueError at what is none."""
        piece = self.socket.recv(1 << 16)
        if not piece or len(self._rest) > _LONGEST:
            raise OSError("the connection was closed")
        *whole, self._rest = (self._rest + piece).split(b"\n")
        messages = [json.loads(line) for line in whole]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def wait_for_end(self):
        self.socket.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 16):
                pass

    def receive_one(self, deadline) -> dict:
        while True:
            self.socket.settimeout(max(0.1, deadline - time.monotonic()))
            if messages := self.receive():
                self.socket.settimeout(None)
                return messages[0]


def join(coordinator: str, count: int, me: int, options: dict) -> Link:
    """Meets the other processes, then starts jax.distributed; must come before jax looks for devices.

    coordinator: HOST:PORT of process 0, which listens there and at the next port, on that address alone. options: what
    must be the same on all, in JSON's types. Raises BadInput, one line: within PATIENCE seconds.
    """
    host, port = _address(coordinator)
    if not 0 <= me < count:
        raise BadInput(f"--process-id {me}: must be from 0 to {count - 1}, one less than --processes")
    options = {**options, "processes": count}
    peers = _call_roll(host, port, count, options) if me == 0 else {0: answer(host, port, me, options)}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # jax tells at length of an end that Link tells of in a line
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # so that jax leaves it to us how to end
    where = f"{host}:{port + 1}"
    try:
        jax.distributed.initialize(
            where if me == 0 else _relay(host, port + 1),
            count,
            me,
            initialization_timeout=PATIENCE,
            shutdown_timeout_seconds=PATIENCE,
            coordinator_bind_address=where if me == 0 else None,
        )
    except RuntimeError as error:
        raise BadInput(f"--coordinator {coordinator}: jax.distributed: {' '.join(str(error).split())[:200]}") from None
    return Link(me, count, peers, jax.distributed.shutdown)


def _relay(host, port):
    """Where jax of another process finds its coordinator: here, by way of a thread that passes everything on.

    When process 0 dies, jax would see its connection close and abort before the one line is said; a relay falls silent.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink, at_end):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
            at_end()

    def serve():
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection((host, port))
            except OSError:  # not yet: jax will try again
                near.close()
                continue
            for source, sink, at_end in ((near, far, far.close), (far, near, lambda: None)):
                threading.Thread(target=pump, args=(source, sink, at_end), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return "{}:{}".format(*server.getsockname())


def _call_roll(host, port, count, options):
    """Process 0: {id: connection} of all others."""
    try:
        socket.create_server((host, port + 1)).close()  # jax's, which would say it at length
        server = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise BadInput(
            f"--coordinator {host}:{port}: this process 0 cannot listen there and at the next port "
            f"({getattr(error, 'strerror', None) or error}): is another one running?"
        ) from None
    return call_roll(server, count, options)


def call_roll(server, count, options):
    """Process 0, with the server that the others connect to: {id: connection} of all of them."""
    deadline, peers = time.monotonic() + PATIENCE, {}
    try:
        with server:
            while len(peers) < count - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = ", ".join(str(i) for i in range(1, count) if i not in peers)
                    raise BadInput(f"--processes {count}: process {missing} has not come within {PATIENCE} s") from None
                peer = _Peer(connection)
                try:
                    hello = peer.receive_one(min(deadline, time.monotonic() + 5))
                    other, theirs = hello["process"], dict(hello["options"])
                except (OSError, ValueError, KeyError, TypeError):  # a stranger
                    connection.close()
                    continue
                if type(other) is not int or not 0 < other < count or other in peers:
                    peer.send({"error": f"--process-id {other}: is taken, or not below {count}"})
                    connection.close()
                    continue
                peers[other] = peer
                _compare(options, theirs, other)
    except BadInput as error:
        for peer in peers.values():
            peer.send({"error": str(error)})
        raise
    for peer in peers.values():
        peer.send({"value": "all here"})
    return peers


def answer(host, port, me, options):
    """Another process: its connection to process 0."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            peer = _Peer(socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())))
            break
        except (OSError, OverflowError) as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror | OverflowError):
                raise BadInput(
                    f"--coordinator {host}:{port}: process 0 cannot be reached within {PATIENCE} s "
                    f"({getattr(error, 'strerror', None) or error})"
                ) from None
            time.sleep(0.2)
    peer.send({"process": me, "options": options})
    try:
        answer = peer.receive_one(deadline + 10)
    except (OSError, ValueError):
        raise BadInput(f"--coordinator {host}:{port}: process 0 went away during the roll call") from None
    if "error" in answer:
        raise BadInput(str(answer["error"]))
    return peer


def _compare(mine, theirs, other):
    for name in sorted(mine.keys() | theirs.keys()):
        a, b = json.loads(json.dumps(mine.get(name))), theirs.get(name)
        if a != b:
            raise BadInput(f"process {other} has {name} {b}, process 0 has {a}: start all processes alike")


def _address(coordinator):
    """(host, port); without a host, loopback."""
    host, _, port = coordinator.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise BadInput(f"--coordinator {coordinator}: expected HOST:PORT, a port below 65535")
    return host.strip("[]") or "127.0.0.1", int(port)
