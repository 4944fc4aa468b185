"""Chromium, and the page in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, async_playwright


def chromium() -> str:
    """The browser. Fails where there is none: without it nothing is shown."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert found, "there is no Chromium: install it, or set CHROMIUM"
    return found


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield launched
        await launched.close()


@asynccontextmanager
async def page_of(browser: Browser, url: str, width: int = 1280, scheme: str = "light") -> AsyncIterator[Page]:
    """A tab with the page, in which nothing goes wrong unheard."""
    context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = await context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    await page.goto(f"{url}/ui")
    yield page
    assert not faults
    await context.close()
