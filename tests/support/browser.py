"""A real Chromium without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
INSTALLED = CHROMIUM is not None and DRIVER is not None
QUIET = (
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage",
)  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    """The driver; `INSTALLED` says whether there is one."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for word in QUIET:
        options.add_argument(f"--{word}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER or ""))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()
