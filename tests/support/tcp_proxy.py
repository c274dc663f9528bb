"""A TCP proxy between a client and Redis that can lose a reply after the server has acted."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class TcpProxy:
    """Listens on loopback and forwards to `port`. `lose_replies(n)` drops the next n replies that
    carry data and cuts their connections; `cut()` drops all connections now; `refuse` closes new
    ones at once, `refuse_after_loss` from the first lost reply on. `halve(text, then)`: the next
    request that contains `text` reaches the server by half, `then` is called, and the rest never
    comes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.refuse = False
        self.refuse_after_loss = False
        self.lost = 0
        self._to_lose = 0
        self._must_contain = b""
        self._to_halve = b""
        self._then: Callable[[], object] = int
        self.halved = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_replies(self, count: int = 1, to: bytes = b"") -> None:
        """Lose the replies to the next `count` requests that contain `to`."""
        with self._lock:
            self._to_lose, self._must_contain = count, to

    def halve(self, text: bytes, then: Callable[[], object]) -> None:
        with self._lock:
            self._to_halve, self._then = text, then

    def cut(self) -> None:
        with self._lock:
            sockets, self._open = self._open, set()
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            armed = threading.Event()
            for source, target, reply in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pump, args=(source, target, reply, armed), daemon=True
                ).start()

    def _takes_half(self, data: bytes) -> bool:
        with self._lock:
            if not self._to_halve or self._to_halve not in data:
                return False
            self._to_halve, self.halved = b"", True
            return True

    def _pump(
        self, source: socket.socket, target: socket.socket, reply: bool, armed: threading.Event
    ) -> None:
        try:
            while data := source.recv(65536):
                if not reply and self._takes_half(data):
                    target.sendall(data[: len(data) // 2])
                    self._then()
                    break
                if not reply:
                    with self._lock:
                        if self._to_lose and self._must_contain in data:
                            self._to_lose -= 1
                            armed.set()
                elif armed.is_set():
                    # The server has acted; the client will never know.
                    self.lost += 1
                    self.refuse = self.refuse or self.refuse_after_loss
                    break
                target.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {source, target}
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()


def wait_until(condition: object, seconds: float = 10.0) -> None:
    """Poll until `condition()` is true; AssertionError when it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
