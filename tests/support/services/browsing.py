"""A browser without a window, and what tests ask it again and again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.support.programs import need
from tests.support.waiting import PATIENCE_S


@contextmanager
def started_browser() -> Iterator[Any]:
    """Chromium without its windows, which takes a third of the CPU time, with its driver; it ends with the context."""
    chromium, driver = need("chromium-headless-shell"), need("chromedriver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    processes = psutil.Process(started.service.process.pid).children(recursive=True)
    try:
        yield started
    finally:
        started.quit()
        for process in processes:  # Debian starts the browser by a script, and the driver ends that script only
            with suppress(psutil.NoSuchProcess):
                process.kill()


def text(browser: Any, selector: str) -> str:
    """What people read in the first element of a selector; empty where there is none."""
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def count(browser: Any, selector: str) -> int:
    """How many elements match."""
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def wait_for(browser: Any, holds: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """Wait until something holds; what the page shows then is the message of the failure."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, browser.execute_script("return document.body.innerText")
        time.sleep(0.1)


def act(browser: Any, selector: str, do: Callable[[Any], None]) -> None:
    """Do something with the first element of a selector; again if the page has drawn that element anew meanwhile."""
    from selenium.common.exceptions import StaleElementReferenceException

    again = retry(
        retry=retry_if_exception_type(StaleElementReferenceException),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_fixed(0.1),
        reraise=True,
    )
    again(lambda: do(browser.find_element("css selector", selector)))()


def resize(browser: Any, width: int) -> None:
    """Make the page so many pixels wide."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wait_for(browser, lambda: browser.execute_script("return innerWidth") == width)
