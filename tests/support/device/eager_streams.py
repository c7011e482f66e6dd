"""Streams of `CudaStandIn` that run as soon as they can, each on a thread of its own, as a GPU's do.

The other ones run as late as they may, one after the other. They cannot show a program in which work of several streams
must be under way at the same time, such as two stages that send and receive.
"""

import threading
from queue import SimpleQueue


class EagerRuns:
    """The queues of the streams of one stand-in."""

    def __init__(self, cuda):
        self.cuda = cuda
        self._queues, self._lock, self._over = {}, threading.RLock(), {}
        self._failed = []
        # The class belongs to this stand-in alone.
        cuda.Stream.put = lambda stream, work, event=None: self.put(stream, work, event)
        cuda.Stream.run = lambda stream, until=None: self.run(stream, until)
        cuda.Stream.query = lambda stream: False

    def put(self, stream, work, event=None):
        with self._lock:
            if stream not in self._queues:
                self._queues[stream] = SimpleQueue()
                threading.Thread(target=self._serve, args=(self._queues[stream],), daemon=True).start()
            done = threading.Event()
            if event is not None:
                self._over[id(event)] = event, done  # it keeps the event, and so its number
            self._queues[stream].put((work, done))
        return done

    def run(self, stream, until=None):
        """Wait for ``until``, or for all that the stream has now."""
        done = self._over[id(until)][1] if until is not None else self.put(stream, lambda: None)
        assert done.wait(30), "a stream that does not end"
        if self._failed:
            raise self._failed[0]

    def _serve(self, queue):
        while True:
            work, done = queue.get()
            try:
                self.cuda.clock_ms += 1
                work()
            except BaseException as error:  # told by whoever waits
                self._failed.append(error)
            done.set()
