"""A headless Chromium for tests of pages: real clicks, real keys, and what it logged or asked for."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
CODES = dict(Tab=9, Enter=13, Escape=27, PageUp=33, PageDown=34, End=35, Home=36,
             ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40)
TEXTS = dict(Enter="\r")
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

    def open(self, path, width, dark=False, place=""):
        self("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url="about:blank")  # else a place alone would not load the page anew
        self("Page.navigate", url=Path(path).as_uri() + place)
        end = time.monotonic() + 30
        while not self.ask("location.protocol == 'file:' && document.readyState == 'complete'"):
            assert time.monotonic() < end, "the page does not load"

    def press(self, key):
        text = TEXTS.get(key, key if len(key) == 1 else None)
        for kind, more in (("keyDown", dict(text=text) if text else {}), ("keyUp", {})):
            self("Input.dispatchKeyEvent", type=kind, key=key,
                 windowsVirtualKeyCode=CODES.get(key, ord(key[0].upper())), **more)

    def point(self, script, click=False):
        """The mouse to the middle of an element, and a click there."""
        self.ask(f"{script}.scrollIntoView({{block: 'center'}})")
        x, y = self.ask(f"(r => [r.left + r.width / 2, r.top + r.height / 2])"
                        f"({script}.getBoundingClientRect())")
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path):
        """A screenshot of the window, as PNG."""
        Path(path).write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

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
