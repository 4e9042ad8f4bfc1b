"""An engine's process without a model, for tests/test_serve_runner.py: what it does stands in the job's prompt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

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
        word, say = order["body"]["prompt"], partial(voice.say, turn=order["turn"])
        if word == "late":  # the end of what ran before
            voice.say(event="done", turn=order["turn"] - 1, outcome={"word": "earlier"})
        say(event="progress", stage="denoise", done=1, total=2)
        if word in (odd := {"torn": '{"event": "prog', "noise": "noise\n", "number": "[1]\n"}):
            voice._answers.write(odd[word])
            voice._answers.flush()
        if word == "torn":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "leave":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        if word == "last":
            say(event="failed", kind="AcceleratorError", message="CUDA error", field=None, last=True)
            time.sleep(1000)
        if word in ("hang", "deaf", "noise", "number"):
            time.sleep(1000)
        try:
            for _ in range(1000 if word == "long" else 1):
                if orders.is_cancelled(order["turn"]):
                    raise Cancelled("asked for")
                time.sleep(0.01)
        except Cancelled as error:
            say(event="cancelled", why=str(error))
            continue
        say(event="done", outcome={"word": word})


if __name__ == "__main__":
    main()
