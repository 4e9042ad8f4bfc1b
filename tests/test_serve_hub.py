"""Progress in memory: a signal that comes while a reader is entered."""

from __future__ import annotations

import asyncio
import threading

from twinreel.serve.hub import Hub


def test_a_signal_inside_a_change_of_readers_ends_them() -> None:
    """The handler runs on the event loop's own thread, wherever that is: it must not wait for itself."""
    hub, woken = Hub(), []

    class Interrupted(set):
        def add(self, reader: object) -> None:
            super().add(reader)
            hub.close()

    async def attend() -> None:
        hub._readers["job"] = Interrupted()
        with hub.attend("job") as reader:
            woken.append(await reader.news(5))

    thread = threading.Thread(target=asyncio.run, args=(attend(),), daemon=True)
    thread.start()
    thread.join(10)
    assert woken == [True] and hub.closed and not hub.readers()
