"""Pictures of the fleet's page for the documents: `python -m tests.support.pictures FOLDER`, a few minutes.

They show a real federation of nine devices, in which one is short of memory, one gets lost, and one's owner tells
little; and a rollout to six runtimes, one of which refuses the release. Each view is taken on a wide screen in light
and in dark colours, and on a phone in dark ones.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from coordinator.rollout.folder import Folder
from coordinator.store.store import Store
from fedge.commands.broker import find_free_port
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.tasks import load_task
from fedge.wire.messages import Phase
from tests.support.broker import local_broker
from tests.support.browser import chromium
from tests.support.programs import WAIT_S, Programs
from tests.support.trained_bundles import trained_bundle
from tests.support.waiting import until

SCREENS = {"": (1180, False, "light"), "-dark": (1180, False, "dark"), "-phone": (390, True, "dark")}
MOST_PIXELS = 1000
"""Of the height: a phone shows one card below the other."""
DEVICES = tuple(f"cam{k}" for k in range(1, 10))
SERVING = ("cam1", "cam2", "cam3", "cam4", "cam5", "cam7")
TASK = load_task("digits")
VIEWS = (
    "fleet", "clusters", "rounds", "accuracy", "samples", "rollouts", "events", "device/cam1", "device/cam5",
    "device/cam6",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the federation


class Shop(Programs):
    """A federation of nine devices, whose images are turned in three ways."""

    async def begin_all(self, broker: str) -> None:
        self.home, self.releases = self.folder / "shop", self.folder / "releases"
        self.at = ("--broker", broker, "--federation", "shop")
        self.samples = self.folder / "samples"
        await self.fedge(
            "sample", "--devices", len(DEVICES), "--partition", "groups", "--n-groups", 3, "--out", self.samples
        )
        for device in DEVICES:
            (self.folder / device).mkdir()
        (self.folder / "cam5" / "egress.toml").write_text('[egress]\npreset = "strict"\n')
        settings = ("--method", "fedepc", "--option", "warm_up=4", "--participation", 0.6, "--rounds", 300)
        work = ("--local-steps", 20, "--devices", len(DEVICES), "--deadline-s", 20)
        await self.begin(
            "coordinator", "coordinator", *self.at, "--home", self.home, "--task", "digits", *settings, *work
        )
        for device in DEVICES:
            more = ("--min-free-ram-gb", 100_000) if device == "cam6" else ()
            own = ("--id", device, "--home", self.folder / device, "--data", self.samples / f"{device}.npz")
            await self.begin(device, "agent", *self.at, "--task", "digits", *own, *more)

    def round(self) -> int:
        """The last one that is done."""
        if not (self.home / "summary.json").exists():
            return 0
        with closing(Store(self.home, intake=True)) as store:
            return max(store.get_round_seconds(), default=0)

    async def release(self) -> None:
        """Sign two releases: the second one has not learned the images of cam3."""
        of = {device: np.load(self.samples / f"{device}.npz") for device in DEVICES}
        await self.fedge("release", "init", self.releases)
        for release, steps, without in ((1, 60, ()), (2, 400, ("cam3", "cam6", "cam9"))):
            taken = [of[device] for device in DEVICES if device not in without]
            x, y = (np.concatenate([each[name] for each in taken]) for name in ("x", "y"))
            bundle = self.folder / f"bundle-{release}"
            trained_bundle(bundle, TASK, x.astype(np.float32), y.astype(np.int64), release=release, steps=steps)
            await self.fedge("release", "add", self.releases, bundle)
        root = self.releases / "metadata/1.root.json"
        for device in SERVING:
            home, kept = self.folder / device, of[device]
            Validation(preprocess(TASK, kept["x"][-40:].astype(np.float32)), kept["y"][-40:].astype(np.int64)).save(
                home
            )
            await self.fedge("install", "--home", home, "--root", root, self.folder / "bundle-1")
            port = find_free_port("127.0.0.1")
            own = ("--home", home, "--port", port, "--id", device)
            await self.begin(f"{device}-serve", "serve", *self.at, *own)
            unlike = device == "cam4"  # its lens is dirty
            x = np.load(self.samples / f"{device}-test.npz")["x"].astype(np.float32)
            await predict(port, np.clip(x + 8.0 * np.random.default_rng(4).random(x.shape), 0, 16) if unlike else x)

    async def roll_out(self) -> None:
        stages = ("--stages", "0.2,0.6,1", "--canary", "cam1", "--soak-s", 3, "--max-failures", 0.3)
        await self.begin("rollout", "rollout", "start", self.releases, "2/manifest.json", *self.at, *stages)
        await until(self._has_refused)

    def _has_refused(self) -> bool:
        record = Folder(self.releases).read()
        return record is not None and any(line.phase is Phase.REFUSED for line in record.devices.values())


async def predict(port: int, x: NDArray[np.float32]) -> None:
    """Have a runtime predict these, one by one."""
    url = f"http://127.0.0.1:{port}/v2"
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    async with http.post(f"{url}/repository/index") as answer:
                        (model, *_) = await answer.json()
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        for image in x:
            told = {"name": "x", "shape": [1, *image.shape], "datatype": "FP32", "data": image.ravel().tolist()}
            async with http.post(f"{url}/models/{model['name']}/infer", json={"inputs": [told]}) as answer:
                assert answer.status == 200, await answer.text()


# ------------------------------------------------------------------------------------------------------ the pictures


def take(browser: Any, url: str, folder: Path, view: str) -> None:
    """Take the pictures of one view."""
    for suffix, (width, mobile, scheme) in SCREENS.items():
        size = {"width": width, "height": 580, "deviceScaleFactor": 1, "mobile": mobile}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get("about:blank")
        browser.get(f"{url}#{view}")
        WebDriverWait(browser, 60).until(
            lambda b: (
                b.execute_script("return document.querySelectorAll('section').length")
                and "…" not in b.find_element("id", "main").text
            )
        )
        height = min(browser.execute_script("return document.documentElement.scrollHeight"), MOST_PIXELS)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        file = folder / f"{view.replace('/', '-')}{suffix}.png"
        file.write_bytes(base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", told)["data"]))
        Image.open(file).convert("RGB").save(file, optimize=True)


def side_by_side(folder: Path, views: tuple[str, ...]) -> None:
    """One picture of several views on phones."""
    phones = [Image.open(folder / f"{view}-phone.png").crop((0, 0, 390, 900)) for view in views]
    whole = Image.new("RGB", (410 * len(phones) - 20, 900), "white")
    for k, phone in enumerate(phones):
        whole.paste(phone, (410 * k, 0))
    whole.save(folder / "phones.png", optimize=True)


def log_in(browser: Any, url: str, token: str) -> None:
    browser.get(url)
    wait = WebDriverWait(browser, 60, ignored_exceptions=(WebDriverException,))  # it is made anew with each refresh
    wait.until(lambda b: b.find_element("css selector", '[data-key="login"]').click() or True)
    browser.find_element("css selector", "dialog input").send_keys(token + Keys.ENTER)
    wait.until(lambda b: b.find_elements("css selector", '[data-key^="a:"]'))


async def main(out: Path) -> None:
    """Play the federation and take all pictures."""
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker("auto", Path(folder)) as broker:
            shop = Shop(Path(folder))
            try:
                await shop.begin_all(f"{broker.host}:{broker.port}")
                await shop.release()
                await until(lambda: shop.round() >= 8)
                await shop.end("cam9", signal.SIGKILL)
                await until(lambda: shop.round() >= 24)
                await shop.fedge("pause", "--home", shop.home)  # the machine is small
                url = await shop.page("--home", shop.home, "--rollouts", shop.releases)
                await shop.roll_out()
                await shop.fedge("resume", "--home", shop.home)
                await until(lambda: shop.round() >= 28)
                token = (shop.home / "ui-token").read_text().strip()
                await asyncio.to_thread(photograph, url, token, out, (*VIEWS, f"round/{shop.round()}"))
            finally:
                await shop.kill_all()


def photograph(url: str, token: str, out: Path, views: tuple[str, ...]) -> None:
    with chromium() as browser:
        for view in views:
            if view == "rollouts":
                log_in(browser, url, token)
            take(browser, url, out, view)
    side_by_side(out, ("fleet", "clusters", "rollouts"))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(main(Path(sys.argv[1])))
