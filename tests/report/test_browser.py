"""The page in headless Chromium: `make test-web`. Screenshots go to the test's folder (`--basetemp`)."""

import json
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from lamella.report.page import write_report
from tests.report import folders

pytestmark = pytest.mark.web
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


class Opened:
    """A page that keeps what it complains of and whom it asks."""

    def __init__(self, browser, url, **context):
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **context})
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.url = url
        self.page.goto(url)

    def scrolled(self):
        """Every chart has been drawn: they are when they come near."""
        height = self.page.evaluate("document.documentElement.scrollHeight")
        for y in range(0, height, 500):
            self.page.evaluate(f"window.scrollTo(0, {y})")
            self.page.wait_for_timeout(40)
        self.page.evaluate("window.scrollTo(0, 0)")
        self.page.wait_for_timeout(200)

    def clean(self):
        own = self.url.split("#")[0]
        base = own.rsplit("/", 1)[0]
        assert self.said == [] and [a for a in self.asked if not a.startswith((own, f"{base}/api/", "data:"))] == []


@pytest.fixture
def opened(browser):
    made = []

    def open_page(url, **context):
        made.append(Opened(browser, url, **context))
        return made[-1]

    yield open_page
    for one in made:
        one.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return write_report(folders.write_all(folder / "runs"), folder / "report.html")


@pytest.fixture
def live(tmp_path):
    """(url, folder) of a running `lamella watch`."""
    import uvicorn

    from lamella.report.watch import make_app

    folder = folders.write_all(tmp_path / "runs")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(folder), log_level="error"))
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/", folder
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    ("name", "context"),
    [("light", {}), ("dark", {"color_scheme": "dark"}), ("phone", {"viewport": {"width": 390, "height": 844}}),
     ("narrow", {"viewport": {"width": 320, "height": 700}, "reduced_motion": "reduce"})],
)  # fmt: skip
def test_the_report_draws_everything_and_asks_nobody(opened, report, tmp_path, name, context):
    one = opened(report.as_uri(), **context)
    one.scrolled()
    plots = one.page.locator(".plot").count()
    assert plots >= 15 and one.page.locator(".plot:not(:has(canvas))").count() == 0
    assert one.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert one.page.evaluate("document.documentElement.dataset.theme") == ("dark" if name == "dark" else "light")
    one.page.screenshot(path=str(tmp_path / f"{name}.png"), full_page=True)
    one.clean()


def test_nothing_in_a_file_is_run(opened, tmp_path):
    evil = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
    run = folders.write_run(tmp_path / "run", 20)
    (run / "config.json").write_text(json.dumps({"name": evil, "store": evil, "lora": {"rank": evil}}))
    for name, tree in (("compare", folders.comparison()), ("decide", folders.decision())):
        tree["name"] = evil
        for entry in tree.get("candidates", tree.get("options")):
            entry["name"] = evil + entry["name"]
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    one = opened(write_report(tmp_path, tmp_path / "r.html").as_uri())
    one.scrolled()
    for plot in one.page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.hover()
    assert one.page.evaluate("window.hit") is None and evil in one.page.inner_text("h1")
    one.clean()


def test_filter_order_and_overlay(opened, report):
    one = opened(report.as_uri())
    names = lambda: one.page.locator("#runs .name").all_inner_texts()  # noqa: E731
    assert sorted(names()) == ["run-000", "run-001", "run-002"]
    one.page.fill("#filter", "failed")
    assert names() == ["run-001"] and "1 of 3" in one.page.inner_text("#count")
    one.page.fill("#filter", "")
    one.page.select_option("#order", "loss")
    data = json.loads(one.page.inner_text("#data") or one.page.evaluate("document.getElementById('data').textContent"))
    assert names() == [r["name"] for r in sorted(data["runs"], key=lambda r: r["loss"])]
    assert one.page.is_disabled("#overlay")
    for name in ("run-000", "run-002"):
        one.page.check(f"input[data-run='{name}']")
    one.page.click("#overlay")
    assert one.page.inner_text("h1") == "2 runs" and one.page.locator(".plot").count() == 1
    one.page.click("button[data-run='run-001']")
    assert one.page.inner_text("h1").startswith("run-001") and "failed" in one.page.inner_text("h1")
    one.clean()


def test_by_keyboard_alone(opened, report):
    one = opened(report.as_uri())
    one.page.keyboard.press("Tab")
    assert one.page.evaluate("document.activeElement.className") == "skip"
    one.page.keyboard.press("Enter")
    assert one.page.evaluate("document.activeElement.id") == "main"
    one.page.focus("button[data-run='run-000']")
    one.page.keyboard.press("Enter")
    assert one.page.evaluate("document.activeElement.tagName") == "H1"
    summary = one.page.locator("summary").first
    summary.focus()
    one.page.keyboard.press("Enter")
    assert one.page.locator("details[open] table").first.is_visible()
    one.page.focus("#theme")
    one.page.keyboard.press("Enter")
    assert one.page.get_attribute("#theme", "aria-pressed") == "true"
    one.clean()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened, report, scheme):
    if not AXE.is_file():
        pytest.skip("axe-core is not there: cd web && npm ci")
    one = opened(report.as_uri(), color_scheme=scheme, bypass_csp=True)
    one.scrolled()
    one.page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    one.page.add_script_tag(content=AXE.read_text())
    found = one.page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa', 'wcag22aa', 'best-practice']})")
    told = [(v["id"], v["nodes"][0]["target"], v["nodes"][0]["failureSummary"]) for v in found["violations"]]
    assert told == []


def test_it_follows_a_run(opened, live):
    url, folder = live
    run = folder / "run-009"
    folders.write_run(run, 30, done=False, f1=False)
    one = opened(f"{url}#run=run-009")
    one.page.wait_for_selector("h1:has-text('run-009')")
    one.page.wait_for_selector(".status:has-text('running')")
    folders.write_lines(run / "metrics.jsonl", [folders.line(31, 0.05)], "a")
    one.page.wait_for_selector("#runs .facts:has-text('step 31')", timeout=15_000)
    one.page.wait_for_selector(".verdict:has-text('step 31')", timeout=15_000)
    assert "1 running" in one.page.inner_text("#live")
    (run / "receipt.json").write_text(json.dumps({"status": "ok", "figures": {"steps_planned": 31}}))
    one.page.wait_for_selector(".status.good", timeout=15_000)
    (folder / "decide.json").write_text(
        json.dumps({**folders.decision(), "verdict": "wait", "sentence": "Wait a little."})
    )
    one.page.wait_for_selector(".decision:has-text('WAIT')", timeout=15_000)
    one.clean()


def test_it_says_when_the_server_is_gone(opened, live):
    url, _ = live
    one = opened(url)
    one.page.wait_for_selector("h1")
    one.page.route("**/api/**", lambda route: route.abort())
    one.page.wait_for_selector("#live:has-text('no answer')", timeout=15_000)


def test_a_hundred_runs_and_a_hundred_thousand_steps(opened, live):
    """Bounds on work: what is sent and what is drawn."""
    url, folder = live
    for k in range(97):
        shutil.copytree(folder / "run-000", folder / f"more-{k:03d}")
    with (folder / "run-000" / "metrics.jsonl").open("w") as file:
        part = [json.dumps(x) for x in folders.metrics_lines(1000, ranks=2)]
        for k in range(100):
            file.writelines(
                text.replace(f'"step": {n + 1},', f'"step": {1000 * k + n + 1},', 1) + "\n"
                for n, text in enumerate(part)
            )
    one = opened(f"{url}#run=run-000")
    sizes = {}
    one.page.on(
        "response",
        lambda r: (
            sizes.setdefault(r.url.rsplit("/api", 1)[-1].split("?")[0], len(r.body())) if "/api" in r.url else None
        ),
    )
    one.page.reload()
    one.page.wait_for_selector("h1:has-text('run-000')", timeout=60_000)
    assert one.page.locator("#runs li").count() == 100
    one.page.fill("#filter", "more-05")
    assert one.page.locator("#runs li").count() == 10
    deadline = time.monotonic() + 30
    while "/runs/run-000" not in sizes and time.monotonic() < deadline:
        one.page.wait_for_timeout(100)
    assert sizes["/runs"] < 60_000 and sizes["/runs/run-000"] < 700_000
    drawn = one.page.evaluate(
        "fetch('api/runs/run-000').then(r => r.json()).then(t => t.sections[0].charts.map(c => c.series[0].x.length))"
    )
    assert max(drawn) < 1300
    assert "100,000 steps" in one.page.inner_text("main")
    one.clean()
