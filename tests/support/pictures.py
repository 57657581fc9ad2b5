"""Pictures of the fleet's page for the documents: `python -m tests.support.pictures URL FOLDER [VIEW ...]`.

VIEW is what follows # in the page's address: fleet, accuracy, round/3, device/cam1. Each is taken on a wide screen in
light colours, and on a phone in dark ones.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

from selenium.webdriver.support.ui import WebDriverWait

from tests.support.browser import chromium

SCREENS = {"": (1180, False, "light"), "-phone": (390, True, "dark")}
MOST_PIXELS = 1800
"""Of the height: a phone shows one card below the other."""


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
            lambda b: b.execute_script("return document.querySelectorAll('section').length")
        )
        height = min(browser.execute_script("return document.documentElement.scrollHeight"), MOST_PIXELS)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        data = browser.execute_cdp_cmd("Page.captureScreenshot", told)["data"]
        (folder / f"{view.replace('/', '-')}{suffix}.png").write_bytes(base64.b64decode(data))


def main(url: str, folder: str, *views: str) -> None:
    """Take all pictures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for view in views or ("fleet",):
            take(browser, url, Path(folder), view)


if __name__ == "__main__":
    main(*sys.argv[1:])
