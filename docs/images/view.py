"""Takes the pictures of docs/view.md: opens each page of a dashboard in Chromium.

pellucid view OUTPUTS --port 6070, beside a run that trains; then
python docs/images/view.py ADDRESS
"""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

RUNS = "run=demo_0&run=demo_1&run=demo_2"
PAGES = {
    "runs": "",
    "curves": f"curves?{RUNS}&metric=val/arithmetic/accuracy&metric=critic/score/mean&metric=actor/entropy"
    "&metric=actor/grad_norm&by=actor_rollout_ref.actor.optim.lr",
    "rollouts": "rollouts?run=guess&sort=reward",
    "sample": "rollouts?run=guess&sort=length",
    "timeline": "timeline?run=demo_0",
    "precision": "precision?run=capture_a&b=capture_b",
    "config": "config?run=demo_1",
    "compare": "compare?run=demo_0&b=demo_1",
}


def main() -> None:
    """Write view_<page>.png beside this file."""
    base = sys.argv[1].partition("?")[0]
    with sync_playwright() as driver:
        page = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"]).new_page()
        page.set_viewport_size({"width": 1100, "height": 560})
        page.goto(sys.argv[1])
        for name, address in PAGES.items():
            page.goto(base + address)
            if name == "sample":
                page.locator("#samples a").first.click()
                page.get_by_role("link", name="surprise").click()
            if name in ("curves", "timeline"):
                page.wait_for_selector(".figure .main-svg")
            page.wait_for_timeout(1500)  # until what slides in has arrived
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(64).save(Path(__file__).with_name(f"view_{name}.png"), optimize=True)


if __name__ == "__main__":
    main()
