"""`goldenppo report`: from result files to a matrix, a page and a badge."""

import base64
import html.parser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from goldenppo.conformance.cli import main

RIGHT = """
import torch
def policy_loss(logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high):
    r = (logprobs - old_logprobs).exp()
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high))
    return (loss * mask).sum() / mask.sum().to(loss.dtype)
"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Result files of a right and a wrong trainer."""
    folder = tmp_path_factory.mktemp("results")
    for name, text, code in (("right", RIGHT, 0), ("wrong", RIGHT.replace("torch.maximum", "torch.minimum"), 1)):
        (folder / f"{name}.py").write_text(text)
        assert main(["check", str(folder / f"{name}.py"), "--op", "policy_loss", "--json", str(folder / f"{name}.json")]) == code
    return folder


@pytest.fixture
def page(results, tmp_path):
    """The page over both, and the names of its elements by attribute."""
    path = tmp_path / "report.html"
    assert main(["report", str(results / "right.json"), str(results / "wrong.json"), "--html", str(path)]) == 0
    return path


class Elements(html.parser.HTMLParser):
    """Every element with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_shows_matrix_cases_and_the_named_bug(page):
    from goldenppo.conformance.cases import clauses

    text = page.read_text(encoding="utf-8")

    assert text.count('<details class="failing"') > 3
    assert "pl-min-for-max" in text
    assert "× the tolerance" in text
    assert clauses()["PL-1"]["sentence"].split("`")[0].split("'")[0][:30] in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert {attributes.get("id") for tag, attributes in Elements(text).found if tag == "select"} == {"level", "dtype"}
    assert [attributes["data-dtype"] for tag, attributes in Elements(text).found if tag == "figure"] == [
        "float64",
        "float32",
        "bfloat16",
    ] * 2


def test_every_cell_of_the_matrix_leads_to_its_cases(page):
    elements = Elements(page.read_text(encoding="utf-8")).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    links = [attributes["href"][1:] for tag, attributes in elements if tag == "a" and attributes["href"].startswith("#")]

    assert len(ids) == len(set(ids))
    assert len(links) == 2 and set(links) <= set(ids)


def test_the_page_loads_nothing_from_outside(page):
    for tag, attributes in Elements(page.read_text(encoding="utf-8")).found:
        if tag != "a":
            assert not any("//" in str(attributes.get(key)) for key in ("src", "href", "srcset", "data", "action")), attributes
    assert "default-src &#39;none&#39;" in page.read_text() or "default-src 'none'" in page.read_text()
    assert "url(" not in page.read_text() and "@import" not in page.read_text()


def test_what_a_trainer_says_is_text(results, tmp_path):
    result = json.loads((results / "wrong.json").read_text())
    evil = """<script>alert(1)</script>"'><img src=x>|"""
    result["adapter"]["name"] = evil
    result["ops"][0]["notes"] = [evil]
    for case in result["cases"]:
        case |= {"purpose": evil, "reason": evil, "got": evil, "dtype": evil, "level": evil, "matches": [evil]}
    (tmp_path / "evil.json").write_text(json.dumps(result))

    html, table = str(tmp_path / "e.html"), str(tmp_path / "e.md")
    assert main(["report", str(tmp_path / "evil.json"), "--html", html, "--markdown", table]) == 0

    tags = [tag for tag, _ in Elements((tmp_path / "e.html").read_text()).found]
    assert tags.count("script") == 1 and "img" not in tags
    assert "<script" not in (tmp_path / "e.md").read_text()


def test_markdown_is_what_is_printed_when_no_file_is_asked_for(results, tmp_path, capsys):
    words = ["report", str(results / "right.json"), str(results / "wrong.json")]
    capsys.readouterr()
    assert main(words) == 0
    printed = capsys.readouterr().out

    assert main([*words, "--markdown", str(tmp_path / "r.md")]) == 0
    assert (tmp_path / "r.md").read_text() == printed
    row = next(line for line in printed.split("\n") if line.startswith("| policy_loss"))
    assert "✓" in row and "✗" in row and "pl-min-for-max" in row


def test_two_results_of_one_name_are_told_apart_by_their_files(results, capsys):
    capsys.readouterr()
    assert main(["report", str(results / "right.json"), str(results / "right.json")]) == 0
    assert f"({results / 'right.json'})" in capsys.readouterr().out


def test_the_badge_shows_level_and_counts(results, tmp_path):
    assert main(["report", str(results / "wrong.json"), "--badge", str(tmp_path / "badge.json")]) == 0

    badge = json.loads((tmp_path / "badge.json").read_text())
    assert badge["schemaVersion"] == 1
    assert badge["message"].startswith("must 0/1 ops, suite ") and "%" not in badge["message"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\x00", "is no JSON"),
        ("[]", "its schema is None"),
        ('{"schema": "other/1"}', "its schema is 'other/1'"),
        ('{"schema": "goldenppo/result/1"}', "suite is no object"),
        (
            '{"schema": "goldenppo/result/1", "suite": {"version": "1", "fixtures": "f"}, '
            '"adapter": {"name": "n", "version": ""}, '
            '"environment": {}, "level": "must", "ops": [3], "cases": []}',
            "ops[0] is no object",
        ),
    ],
)
def test_a_file_that_is_no_result_is_a_usage_error(tmp_path, capsys, text, says):
    if text is not None:
        (tmp_path / "r.json").write_text(text)

    assert main(["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 2

    said = capsys.readouterr().err
    assert said.startswith("goldenppo: ") and says in said and "Traceback" not in said
    assert not (tmp_path / "r.html").exists()


def test_usage_errors_end_2(results, capsys):
    right = str(results / "right.json")
    badge, html = ["--badge", "b.json"], ["--html", "/no/such/folder/r.html"]
    for words in ([], [right, right, *badge], [right, *html], [right, "--markdown", "/"]):
        assert main(["report", *words]) == 2
        assert capsys.readouterr().err.startswith("goldenppo: ")


def test_it_does_not_import_torch(results):
    code = (
        "import sys; from goldenppo.conformance.cli import main; "
        f"main(['report', {str(results / 'wrong.json')!r}, '--html', {str(results / 'light.html')!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    import goldenppo

    root = str(Path(goldenppo.__file__).resolve().parent.parent)
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, check=True, timeout=60)


class Browser:
    """A headless Chromium, driven over the two pipes of its devtools protocol; notes every address that it asks for."""

    def __init__(self, profile):
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()
        wiring = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.asked, self.events, self.session = 0, b"", [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write)
        os.close(self.read)

    def receive(self):
        while b"\0" not in self.rest:
            more = os.read(self.read, 1 << 16)
            assert more, "the browser ended"
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        if "method" in message:
            self.events.append(message["method"])
        return message

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.events:
            self.receive()

    def value(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector):
        box = self.value(
            f"(function () {{ var item = document.querySelector({selector!r}); item.scrollIntoView({{block: 'center'}}); "
            "var box = item.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def enter(self):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r" if kind == "keyDown" else "",
                windowsVirtualKeyCode=13,
            )  # fmt: skip

    def until(self, script):
        import time

        end = time.monotonic() + 20
        while not self.value(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


@pytest.mark.skipif(CHROMIUM is None or sys.platform == "win32", reason="no chromium on the PATH")
def test_in_a_browser_a_click_leads_to_the_failing_case(browser, page, tmp_path):
    browser.open(page)
    shown = "(document.querySelector('details.failing[open] .named') || {checkVisibility: () => false}).checkVisibility()"
    assert not browser.value(shown)

    browser.click("td.bad a")
    browser.until(shown)
    text = browser.value("document.querySelector('details.failing[open]').innerText")
    assert "pl-min-for-max" in text and "× the tolerance" in text and "PL-" in text

    closed = "details.cell[open] > details.failing:not([open])"
    before = browser.value(f"document.querySelectorAll('{closed}').length")
    browser.click(f"{closed} > summary")
    browser.until(f"document.querySelectorAll('{closed}').length === {before - 1}")

    browser.value("document.querySelector('td.good a').focus()")  # the same by keyboard
    browser.enter()
    browser.until("document.querySelector(location.hash).open && document.activeElement.tagName === 'SUMMARY'")

    browser.value("var d = document.getElementById('dtype'); d.value = 'float32'; d.dispatchEvent(new Event('change'))")
    assert browser.value("Array.from(document.querySelectorAll('figure')).filter(f => f.checkVisibility()).length") == 2
    assert browser.value("document.querySelectorAll('tr[data-dtype=float64]:not([hidden])').length") == 0

    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=2, mobile=True)
    browser.until("innerWidth === 360")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    backs = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        backs.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert backs[0] != backs[1]
    if os.environ.get("GOLDENPPO_SCREENSHOT"):
        picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(os.environ["GOLDENPPO_SCREENSHOT"]).write_bytes(base64.b64decode(picture))

    assert [address for address in browser.asked if not address.startswith(("file:", "data:"))] == []
