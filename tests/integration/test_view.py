"""`pellucid view`: every page over real runs, one that trains, and one in a real browser."""

import html
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from commands import wait_for

from conftest import NUM_STEPS, Workspace, contents

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from pellucid.files.rollout_dump import read_rollouts
from pellucid.files.rundir import RunDir
from pellucid.metrics.trackers import read_metrics
from pellucid.view import pages
from pellucid.view.app import PAGES, make_app

CHROMIUM = shutil.which("chromium")
TOKEN = "the-key"


def client(*folders: Path) -> TestClient:
    """Return a browser that has opened the printed address."""
    browser = TestClient(make_app(folders, TOKEN), base_url="http://127.0.0.1:6060")
    assert browser.get("/", params={"token": TOKEN}).status_code == 200
    return browser


def table(text: str, name: str) -> list[str]:
    """Return the rows of a table, without tags."""
    body = re.search(rf'<table id="{name}">(.*?)</table>', text, re.DOTALL)
    assert body is not None, text
    rows = re.findall(r"<tr[^>]*>(.*?)(?=<tr|</thead>|$)", body[1], re.DOTALL)[1:]
    return [" ".join(html.unescape(re.sub("<[^>]+>", " ", row)).split()) for row in rows]


def figures(text: str) -> list[str]:
    return [html.unescape(address) for address in re.findall(r'data-figure="([^"]+)"', text)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, server, finished):
    """Two runs with captures that differ from step 2 on, and one without captures: of seed 0, 0 and 1."""
    folder = tmp_path_factory.mktemp("view")
    work = Workspace(folder, server)
    captures = ("global_profiler.tool=precision_debugger", "global_profiler.steps=[1,2]", "trainer.total_training_steps=2",
                "actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[0]",
                "actor_rollout_ref.rollout.profiler.enable=false")  # fmt: skip
    started = [
        work.start("train", work.recipe, f"trainer.default_local_dir=outputs/{name}", *captures, *more)
        for name, more in (("a", []), ("b", ["actor_rollout_ref.actor.optim.lr=0.001"]))
    ]
    assert [one.wait().status for one in started] == [0, 0]
    shutil.copytree(finished, folder / "outputs" / "c")
    return folder / "outputs"


def test_only_the_printed_address_opens_it(finished):
    app = make_app([finished], TOKEN)
    stranger = TestClient(app, base_url="http://127.0.0.1:6060", follow_redirects=False)
    assert stranger.get("/").status_code == 403 and stranger.get("/", params={"token": "guess"}).status_code == 403
    assert stranger.get("/static/view.js").status_code == 403
    let_in = stranger.get("/config", params={"token": TOKEN, "run": "run"})
    assert let_in.status_code == 303 and TOKEN not in let_in.headers["location"] and "run=run" in let_in.headers["location"]
    cookie = let_in.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert stranger.get("/").status_code == 200
    elsewhere = TestClient(app, base_url="http://a-name-of-theirs.example:6060")
    assert elsewhere.get("/", params={"token": TOKEN}).status_code == 403


@pytest.mark.parametrize("page", PAGES)
def test_every_page_needs_nothing_from_elsewhere(outputs, page):
    query = {"run": "c", "b": "a"}
    if page == "sample":
        record = read_rollouts(RunDir(outputs / "c").rollouts(1))[0]
        query |= {"step": "1", "uid": record["uid"], "sample": str(record["sample"])}
    answer = client(outputs).get("/" if page == "runs" else f"/{page}", params=query)
    assert answer.status_code == 200
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', answer.text)


def test_the_first_page_has_every_run_and_how_it_stands(outputs):
    rows = table(client(outputs).get("/").text, "runs")
    steps = {row.split()[0]: row.split()[1:5] for row in rows}
    assert steps == {"a": ["finished", "2", "/", "2"], "b": ["finished", "2", "/", "2"],
                     "c": ["finished", f"{NUM_STEPS}", "/", f"{NUM_STEPS}"]}  # fmt: skip


def test_alerts_are_on_the_first_page(outputs, tmp_path):
    shutil.copytree(outputs / "c", tmp_path / "c")
    run = RunDir(tmp_path / "c")
    starts = json.loads(run.run_json.read_text())
    starts["starts"][-1] |= {"exit_reason": "failed: it broke", "alerts": [
        {"step": 3, "metric": "reward/failures", "value": 0.25, "message": "a quarter <failed>"}]}  # fmt: skip
    run.run_json.write_text(json.dumps(starts))
    text = client(tmp_path).get("/").text
    assert "failed: it broke" in text and "step 3: reward/failures 0.25" in text and "a quarter &lt;failed&gt;" in text


def test_curves_are_those_of_the_metrics_file(outputs):
    browser = client(outputs)
    text = browser.get("/curves", params={"run": ["c", "a"], "metric": "actor/entropy"}).text
    (address,) = figures(text)
    drawn = {trace["name"]: trace for trace in browser.get(f"/{address}").json()["data"]}
    for name in ("c", "a"):
        rows = [row for row in read_metrics(outputs / name / "metrics.jsonl") if "actor/entropy" in row]
        assert drawn[name]["y"] == [row["actor/entropy"] for row in rows]
    assert "trainer.total_training_steps" in text, "the configs differ in it"
    grouped = browser.get(f"/{address}&by=actor_rollout_ref.actor.optim.lr&smooth=0.5&log=on").json()
    assert [trace["name"] for trace in grouped["data"]][-1] == "actor_rollout_ref.actor.optim.lr: 0.0001 (2 runs)"
    assert grouped["layout"]["yaxis"]["type"] == "log"
    refused = browser.get(f"/{address}&x=miles")
    assert refused.status_code == 400 and "Valid: step, tokens, hours" in refused.json()["error"]


def test_rollouts_are_filtered_sorted_and_paged(outputs, monkeypatch):
    browser, records = client(outputs), read_rollouts(RunDir(outputs / "c").rollouts(NUM_STEPS))

    def shown(**query):
        text = browser.get("/rollouts", params={"run": "c", **query}).text
        return re.findall(r"(\d+) of (\d+) samples", text)[0], table(text, "samples")

    (num, num_all), rows = shown(sort="length", order="up")
    lengths = [int(row.split()[-2]) for row in rows]
    assert int(num) == int(num_all) == len(records) == len(rows) and lengths == sorted(lengths)
    assert shown(min="2")[0][0] == "0" and shown(end="length")[0][0] == str(sum(r["finish_reason"] == "length" for r in records))
    of_prompt, shown_at_once = records[0]["uid"], shown()[1]
    assert shown(text=of_prompt)[0][0] == str(sum(of_prompt in r["uid"] for r in records))
    monkeypatch.setattr(pages, "PAGE_SIZE", 5)
    pieces = [shown(page=str(page))[1] for page in range(1, 5)]
    assert [len(piece) for piece in pieces] == [5, 5, 5, 1]
    assert sorted(row for piece in pieces for row in piece) == sorted(shown_at_once)


def test_a_sample_shows_its_tokens_in_each_colouring_and_its_prompt_in_other_steps(outputs):
    browser, record = client(outputs), read_rollouts(RunDir(outputs / "c").rollouts(2))[0]
    query = {"run": "c", "step": "2", "uid": record["uid"], "sample": str(record["sample"])}
    drawn = {}
    for colour in ("log-prob gap", "advantage", "entropy", "surprise"):
        text = browser.get("/sample", params=query | {"colour": colour}).text
        assert f"<b>{colour}</b>" in text
        tokens = re.findall(r'<span class="token([^"]*)" style="background:([^"]*)" title="([^"]*)">(.*?)</span>', text)
        assert [html.unescape(token[3]) for token in tokens] == record["pieces"]
        assert f"rollout log-prob {record['rollout_logprobs'][0]:.6g}" in tokens[0][2]
        drawn[colour] = [token[1] for token in tokens]
    assert all(all(colours) for colours in drawn.values()) and len({tuple(colours) for colours in drawn.values()}) > 3
    assert f"{NUM_STEPS} nearest of {NUM_STEPS} steps" in text


def test_the_timeline_has_the_stages_of_the_step_and_the_report(outputs):
    browser = client(outputs)
    page = browser.get("/timeline", params={"run": "c", "step": "3"})
    drawn = browser.get(f"/{figures(page.text)[0]}").json()
    assert {"step", "rollout_generate", "reward", "actor_update"} <= {trace["name"] for trace in drawn["data"]}
    assert "actor_update" in browser.get("/report", params={"run": "c"}).text
    trace = browser.get("/trace", params={"run": "c"})
    assert trace.content[:2] == b"\x1f\x8b" and 'filename="c.json.gz"' in trace.headers["content-disposition"]


def test_captures_are_compared_on_the_precision_page(outputs):
    browser = client(outputs)
    answer = browser.get("/precision", params={"run": "a", "b": "b"}).text
    assert "First divergence" in answer
    assert "First divergence" in browser.get("/heatmap", params={"run": "a", "b": "b"}).text
    same = browser.get("/precision", params={"run": "a", "b": "a"}).text
    assert "First divergence" not in same and 'class="good"' in same


def test_the_config_page_says_who_set_each_key(outputs):
    rows = {row.split()[0]: row for row in table(client(outputs).get("/config", params={"run": "b"}).text, "config")}
    assert "override" in rows["actor_rollout_ref.actor.optim.lr"] and " default " in rows["algorithm.gamma"]


def test_two_runs_are_compared_to_the_step_at_which_they_part(outputs):
    browser = client(outputs)
    parted = browser.get("/compare", params={"run": "a", "b": "b"}).text
    assert "The metrics differ first in step" in parted and "actor_rollout_ref.actor.optim.lr" in parted
    assert re.search(r"The digests differ first in step \d, stage actor", parted)
    same = browser.get("/compare", params={"run": "a", "b": "a"}).text
    assert "have the same metrics" in same and "captured are equal" in same


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/rollouts?run=nope", "there is no run &#39;nope&#39;"),
        ("/rollouts?run=c&step=99", "there is no step 99"),
        ("/rollouts?run=c&step=x", "&#39;x&#39; is no number"),
        ("/rollouts?run=c&min=lots", "&#39;lots&#39; is no number"),
        ("/sample?run=c&step=1&uid=nope", "has no sample 0"),
        ("/timeline?run=c&step=77", "there is no step 77"),
    ],
)
def test_a_mistake_in_an_address_is_said(outputs, address, said):
    answer = client(outputs).get(address)
    assert answer.status_code == 400 and said in answer.text


def test_a_run_is_followed_while_it_trains(work, outputs):
    """Its step grows, every page of it can be seen, and its end is told."""
    command = work.start("train", work.recipe, "trainer.total_training_steps=100000", "trainer.save_freq=-1")
    metrics, seen = work.run_dir / "metrics.jsonl", list[int]()
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, command)
    browser = client(work.run_dir)

    def look() -> bool:
        (row,) = table(browser.get("/").text, "runs")
        stand = re.match(r"run training (\d+) / 100000 ", row)
        assert stand is not None, row
        seen.append(int(stand[1]))
        return len(set(seen)) == 3

    wait_for(look, command)
    assert seen == sorted(seen)
    for page in ("curves", "rollouts", "timeline", "config", "precision"):
        answer = browser.get(f"/{page}", params={"run": "run"})
        assert answer.status_code == 200 and ('data-live="5"' in answer.text) == (page == "curves")
    command.signal(signal.SIGKILL)
    command.wait()
    (row,) = table(browser.get("/").text, "runs")
    assert "lost: its process is gone" in row


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "the folder 'nowhere' does not exist"),
        (["."], "there is no run in ."),
        (["run", "--port", "99999"], "Invalid value for '--port'"),
    ],
)
def test_what_cannot_be_shown_is_refused(work, finished, arguments, said):
    work.environment["COLUMNS"] = "200"
    if "run" in arguments:
        work.copy_run(finished)
    assert said in work.run("view", *arguments, status=2).output


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")
def test_a_browser_draws_every_page_without_a_word_of_complaint(work, outputs):
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    shutil.copytree(outputs, work.folder / "outputs")
    command = work.start("view", "--port", "0")
    wait_for(lambda: "Ctrl-C" in command.output, command)
    address = re.findall(r"http://\S+", command.output)[0]
    base, complaints, before = address.partition("/?")[0], [], contents(work.folder / "outputs")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith(base) else None)
        page.goto(address)
        assert page.locator("#runs tbody tr").count() == 3 and "token" not in page.url
        page.locator("input.filter").fill("a")
        page.locator("#runs a", has_text="c").wait_for(state="hidden")
        page.locator("input.filter").fill("")
        page.locator("#runs a", has_text="c").click()
        page.wait_for_selector(".figure .main-svg")
        page.locator("input[name=run][value=a]").check()
        page.locator("button", has_text="Draw").click()
        page.wait_for_function("document.querySelector('.figure')?.data?.length === 2")
        page.locator("nav a", has_text="rollouts").click()
        page.locator("#samples a").first.click()
        assert page.locator("#tokens .token").count() > 0
        page.locator("nav a", has_text="timeline").click()
        page.wait_for_selector(".figure .main-svg")
        assert page.locator(".legendtext", has_text="actor_update").count() == 1
        page.goto(f"{base}/precision?run=a&b=b")
        assert page.frame_locator("iframe").locator("body").inner_text().count("divergence") > 0
        page.goto(f"{base}/config?run=b")
        page.locator("#set-only").check()
        page.locator("#config tr", has_text="algorithm.gamma").wait_for(state="hidden")
        assert page.locator("#config tr.set td:nth-child(4)", has_text="override").first.is_visible()
        page.goto(f"{base}/compare?run=a&b=b")
        assert "differ first in step" in page.locator("#first").inner_text()
        browser.close()
    assert complaints == []
    command.signal(signal.SIGINT)
    assert command.wait().status == 130 and "Traceback" not in command.output
    assert contents(work.folder / "outputs") == before, "looking changes nothing"
