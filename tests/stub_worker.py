"""An engine's process without a model, for tests/test_serve_runner.py: what it does stands in the job's prompt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from twinreel import Cancelled
from twinreel.serve.child import Voice
from twinreel.serve.worker import Orders


def main() -> None:
    """Start, or not, as the first argument says; then do what prompts say."""
    voice = Voice()
    orders = Orders(voice)
    threading.Thread(target=orders.listen, daemon=True).start()
    print("words on standard output are no answers")
    if sys.argv[1] == "broken":
        voice.say(event="failed", message="no such weights")
        sys.exit(1)
    if sys.argv[1] == "child":  # a rank of its own
        child = subprocess.Popen(["sleep", "1000"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
    voice.say(event="progress", stage="warm-up", done=1, total=1)
    voice.say(event="ready", engine={"pid": os.getpid()})
    while True:
        order = orders.next()
        word = order["body"]["prompt"]
        voice.say(event="progress", stage="denoise", done=1, total=2)
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "leave":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        if word == "last":
            voice.say(event="failed", kind="AcceleratorError", message="CUDA error", field=None, last=True)
            time.sleep(1000)
        if word in ("hang", "deaf"):
            time.sleep(1000)
        try:
            for _ in range(1000 if word == "long" else 1):
                if orders.is_cancelled(order["turn"]):
                    raise Cancelled("asked for")
                time.sleep(0.01)
        except Cancelled as error:
            voice.say(event="cancelled", why=str(error))
            continue
        voice.say(event="done", outcome={"word": word})


if __name__ == "__main__":
    main()
