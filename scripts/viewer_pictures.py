"""Write the pictures of docs/viewer.md: the views of a run, as WebP files.

    python scripts/viewer_pictures.py runs/gsm8k [--out docs/images] [--only group,tokens]

Starts the viewer's server, opens Chromium without a window, and chooses what to show by itself: the group with the widest
rewards, its best rollout, the task that gained most. Needs the extras view and browser, Chromium, and Pillow.
"""

import argparse
import asyncio
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image
from playwright.async_api import async_playwright

from ludic_view import api
from ludic_view.index import Runs
from ludic_view.server import serve

SIZE = {"width": 1280, "height": 800}


def routes(ask: Callable[[str], dict[str, Any]], run: str) -> dict[str, str]:
    """Name of the picture -> what it shows."""
    base = f"#/run/{quote(run, safe='')}"
    steps = ask("/steps")["steps"]
    most = max(row["num_rollouts"] for row in steps)
    last = [row["step"] for row in steps if row["num_rollouts"] == most][-1]  # a run may be in the midst of a step
    (group,) = ask("/groups?sort=-spread&limit=1")["groups"]
    best = group["rollouts"][group["rewards"].index(max(group["rewards"]))]
    task = ask("/tasks?sort=-gain&limit=1")["tasks"][0]["task"]
    return {
        "metrics": f"{base}/metrics?smooth=0.6",
        "step": f"{base}/step/{last}",
        "groups": f"{base}/step/{last}?show=groups&sort=-spread",
        "group": f"{base}/group/{quote(group['group'], safe='')}",
        "rollout": f"{base}/rollout/{quote(best, safe='')}",
        "tokens": f"{base}/rollout/{quote(best, safe='')}?view=tokens&color=logprob",
        "advantage": f"{base}/rollout/{quote(best, safe='')}?view=tokens&color=advantage",
        "task": f"{base}/task/{quote(task, safe='')}",
        "time": f"{base}/time",
        "health": f"{base}/health",
    }


async def take(folder: Path, out: Path, only: set[str], scheme: str) -> None:
    runs = Runs(folder)
    (run,) = runs.ids()[:1]
    runs.get(run).refresh(600)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(runs, port=0, on_ready=address.set_result))
    shown = routes(lambda rest: api.answer(runs, f"/api/runs/{quote(run, safe='')}{rest}"), run)
    out.mkdir(parents=True, exist_ok=True)
    async with async_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport=SIZE, color_scheme=scheme)
        for name, route in shown.items():
            if only and name not in only:
                continue
            await page.goto(f"{await address}{route}")
            await page.wait_for_selector("main h1")
            await page.wait_for_timeout(1500)  # rows and curves
            if await page.query_selector(".tok[data-i='3']"):
                await page.hover(".tok[data-i='3']")
            file = out / f"viewer_{name}{'_dark' if scheme == 'dark' else ''}.webp"
            picture = Image.open(io.BytesIO(await page.screenshot()))
            picture.convert("RGB").save(file, "WEBP", lossless=True, quality=90, method=6)
            sys.stdout.write(f"{file}  {file.stat().st_size // 1024} KB\n")
        await browser.close()
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "images")
    parser.add_argument("--only", default="", help="names of pictures, with commas between them; default: all")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    given = parser.parse_args()
    asyncio.run(take(given.run, given.out, {name for name in given.only.split(",") if name}, given.scheme))


if __name__ == "__main__":
    main()
