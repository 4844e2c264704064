"""A headless Chromium for tests of pages: what it shows, logged and asked for."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
LAUNCH = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""  # the browser listens on descriptor 3 and answers on 4
SAID = "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"


class Browser:
    """A headless Chromium, spoken to over a pipe (the DevTools protocol)."""

    def __init__(self, folder):
        theirs, self.send = os.pipe()
        self.receive, back = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs), str(back), CHROMIUM, "--headless", "--no-sandbox",
             "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
             "--remote-debugging-pipe", f"--user-data-dir={folder}"],
            pass_fds=(theirs, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(back)
        self.unread, self.number, self.session, self.events = b"", 0, {}, []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self.session = dict(sessionId=attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params, **self.session)
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.unread:
                block = os.read(self.receive, 1 << 16)
                assert block, "the browser is gone"
                self.unread += block
            answer, _, self.unread = self.unread.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == self.number:
                return answer["result"]
            self.events.append(answer)

    def ask(self, script):
        found = self("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, path, width):
        self("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        scheme = dict(name="prefers-color-scheme", value="light")
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url="about:blank")  # so that the page before is not taken for this one
        self("Page.navigate", url=Path(path).as_uri())
        end = time.monotonic() + 30
        while not self.ask("location.protocol == 'file:' && document.readyState == 'complete'"):
            assert time.monotonic() < end, "the page does not load"

    def complaints(self):
        """What the page logged or threw, and every address that it asked for beside its own."""
        asked = [event["params"]["request"]["url"] for event in self.events
                 if event["method"] == "Network.requestWillBeSent"]
        return [event for event in self.events if event["method"] in SAID] + [
            url for url in asked if not (url.startswith("data:") or  # a picture within the page
                                         url.startswith("file:") and url.endswith(".html"))]

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.send)
        os.close(self.receive)
