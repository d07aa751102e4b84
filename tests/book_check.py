"""Opens every page of a folder in one headless Chromium, at the width of a phone, and checks it.

  usage: book_check.py FOLDER PROFILE

Prints "ok NAME" or "not ok NAME: REASON" for each property. PROFILE is an empty folder for the browser. Chromium is
driven by its DevTools protocol over a pipe (file descriptors 3 and 4), a JSON text and a zero byte a message, so only
Python's own library is needed. No network: a page that asks for anything but files of FOLDER fails.
"""
import json
import os
import re
import select
import subprocess
import sys
import time
from urllib.parse import unquote

WIDTH, HEIGHT, SECONDS = 390, 844, 300


class Browser:
    def __init__(self, profile):
        to_read, self.out = os.pipe()
        self.into, to_write = os.pipe()

        def hand_over():  # the browser reads 3 and writes 4
            read, write = os.dup(to_read), os.dup(to_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        arguments = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--remote-debugging-pipe",
                     "--no-first-run", "--disable-background-networking", "--user-data-dir=" + profile, "about:blank"]
        self.process = subprocess.Popen(arguments, preexec_fn=hand_over, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self.rest, self.number, self.events, self.session = b"", 0, [], None
        self.until = time.time() + SECONDS

    def give_up(self, reason):
        print("not ok browser: " + reason)
        self.process.kill()
        sys.exit(1)

    def read(self):
        while b"\0" not in self.rest:
            ready = select.select([self.into], [], [], max(0, self.until - time.time()))[0]
            piece = os.read(self.into, 1 << 20) if ready else b""
            if not piece:
                self.give_up("chromium ended, or does not answer")
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    self.give_up("%s: %s" % (method, answer["error"]["message"]))
                return answer["result"]
            self.events.append(answer)

    def open_tab(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Log", "Network":
            self.call(domain + ".enable")
        self.size(WIDTH)

    def size(self, width):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=False)

    def go(self, url):
        """Opens a page, and waits until it is loaded. Its events are in self.events."""
        self.events = []
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.read())

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            self.give_up("%s: %s" % (expression[:80], answer["exceptionDetails"]))
        return answer["result"].get("value")


LOOK = """(async () => {
    await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
    return {
        title: document.title,
        ids: [...document.querySelectorAll("[id]")].map(one => one.id),
        links: [...document.querySelectorAll("a[href]")].map(one => one.href),
        pictures: [...document.images].map(one => [one.src, one.naturalWidth]),
        width: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth),
        widest: [...document.querySelectorAll("main *")].filter(one => {
            for (let box = one; box !== document.body; box = box.parentElement)
                if (getComputedStyle(box).overflowX !== "visible") return false;
            return one.getBoundingClientRect().right > innerWidth + 1;
        }).slice(0, 1).map(one => one.outerHTML.slice(0, 100))[0],
        text: document.body.innerText.length,
    };
})()"""

failed = False


def check(name, problems):
    global failed
    for problem in problems[:10]:
        print("not ok %s: %s" % (name, problem.replace("\n", " ")))
    if not problems:
        print("ok " + name)
    failed = failed or bool(problems)


def complaints(events, folder):
    """What the page wrote to the console as an error or a warning, and its requests outside the folder."""
    for event in events:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            yield about["exceptionDetails"].get("exception", {}).get("description", "an exception")
        if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            yield "console: %s" % about["args"]
        if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            yield "%s %s" % (about["entry"]["text"], about["entry"].get("url", ""))
        if method == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith("file://" + folder + "/") and not url.startswith("data:"):
                yield "asks for " + url


def check_pages(browser, folder):
    pages = {}
    errors, overflow, pictures, empty = [], [], [], []
    for top, _, files in os.walk(folder):
        for file in sorted(files):
            if file.endswith(".html"):
                path = os.path.join(top, file)
                name = os.path.relpath(path, folder)
                browser.go("file://" + path)
                look = browser.value(LOOK)
                pages[path] = look
                errors += ["%s: %s" % (name, one) for one in complaints(browser.events, folder)]
                pictures += ["%s: %s" % (name, url) for url, width in look["pictures"] if not width]
                if look["width"] > WIDTH or look.get("widest"):
                    overflow.append("%s is %d pixels wide on %d: %s" % (name, look["width"], WIDTH, look.get("widest")))
                if look["text"] < 200 or not look["title"]:
                    empty.append(name)
    links = []
    for path, look in pages.items():
        for link in look["links"]:
            if not link.startswith("file://"):
                continue  # another site, which a reader may visit
            target, _, anchor = link[len("file://"):].partition("#")
            target, anchor = unquote(target), unquote(anchor)
            name = os.path.relpath(path, folder)
            if not target.startswith(folder + "/") or not os.path.isfile(target):
                links.append("%s: %s is no file of the book" % (name, target))
            elif anchor and target in pages and anchor not in pages[target]["ids"]:
                links.append("%s: %s has no anchor %s" % (name, os.path.relpath(target, folder), anchor))
    if sum(len(look["pictures"]) for look in pages.values()) < 40 or len(pages) < 60:
        empty.append("%d pages" % len(pages))
    check("every_page_has_a_title_and_text", empty)
    check("links_and_anchors_resolve", links)
    check("pictures_load", pictures)
    check("no_error_on_the_console_and_nothing_from_the_network", errors)
    check("no_page_is_wider_than_a_phone", overflow)
    return pages


def turn_problems(pages, folder):
    """Links to the next page lead from the first page through all of the contents, in the order of the path; links to
    the previous page lead back."""
    turns = {}
    for path in pages:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for relation in "next", "prev":
            found = re.search(r'<a href="([^"]*)" rel="%s">' % relation, text)
            turns[relation, path] = found and os.path.normpath(os.path.join(os.path.dirname(path), found.group(1)))
    order, page = [], os.path.join(folder, "index.html")
    while page and page not in order:
        order.append(page)
        page = turns["next", page]
    with open(os.path.join(folder, "index.html"), encoding="utf-8") as file:
        listed = re.findall(r'<li><a href="([^"#]*)"', file.read().split("</nav>")[0])
    if [os.path.join(folder, page) for page in listed] != order:
        yield "%d pages follow each other, the contents have %d" % (len(order), len(listed))
    for before, page in zip(order, order[1:]):
        if turns["prev", page] != before and page != order[-1]:  # the last, a trace, is a page of its own
            yield "%s: the previous page is %s" % (page, turns["prev", page])
    path = ["00-", "21-", "09-", "11-", "07-", "08-", "15-", "choosing", "28-", "steps/index", "steps/1"]
    at = [next((i for i, page in enumerate(listed) if page.startswith("notes/" + one)), -1) for one in path]
    if at != sorted(at) or -1 in at:
        yield "the path is in another order: %s" % listed[:16]


def set_controls(browser, **controls):
    """Sets controls as a reader does, and returns the numbers that the page then shows."""
    return browser.value("""(() => {
        for (const [id, value] of Object.entries(%s)) {
            document.getElementById(id).value = value;
            document.getElementById(id).dispatchEvent(new Event("input"));
        }
        const text = id => document.getElementById(id).textContent;
        return {bubble: text("bubble"), idle: text("idle"), peak: text("peak"), refused: text("refused"),
                shown: !document.getElementById("result").hidden,
                boxes: document.querySelectorAll("#drawing rect:not(.wait)").length,
                waits: document.querySelectorAll("#drawing rect.wait").length,
                rows: [...document.querySelectorAll("#ranks tr")].map(
                    row => [...row.cells].map(one => one.textContent)),
                picture: document.getElementById("drawing").innerHTML};
    })()""" % json.dumps(controls))


def explorer_problems(browser, folder):
    browser.go("file://" + folder + "/explorer.html")
    data = json.loads(browser.value("document.getElementById('schedules').textContent"))["schedules"]
    before = None
    selections = (("1f1b", 4, 1, 8), ("1f1b", 4, 1, 9), ("1f1b", 5, 1, 9), ("1f1b", 1, 1, 3), ("zb-h1", 5, 1, 9),
                  ("gpipe", 5, 1, 9), ("interleaved", 4, 2, 8), ("interleaved", 4, 3, 8), ("interleaved", 8, 4, 16),
                  ("interleaved", 4, 2, 6))
    for kind, stages, chunks, batches in selections:
        shown = set_controls(browser, schedule=kind, stages=stages, batches=batches, chunks=max(chunks, 2))
        wanted = data["%s/%d/%d/%d" % (kind, stages, chunks, batches)]
        name = "%s, %d ranks of %d, %d micro-batches" % (kind, stages, chunks, batches)
        if "error" in wanted:
            if shown["shown"] or wanted["error"] not in shown["refused"]:
                yield "%s: is refused, but drawn" % name
            continue
        words = [rank.split() for rank in wanted["ranks"]]
        lengths = {"F": 1, "B": 2, "I": 1, "W": 1}
        work = sum(lengths[word[0]] for word in words[0] if word[0] in lengths)
        if shown["bubble"] != "%.1f%%" % (100 * wanted["bubble"]):
            yield "%s: bubble %s, in the list %s" % (name, shown["bubble"], wanted["bubble"])
        if [float(one) for one in shown["idle"].split(" of ")] != [
                round(one / chunks, 2) for one in (wanted["span"] - work, wanted["span"])]:
            yield "%s: idle %s" % (name, shown["idle"])
        if [float(one) for one in shown["peak"].split()] != [round(one / chunks, 2) for one in wanted["peak"]]:
            yield "%s: peak %s, in the list %s" % (name, shown["peak"], wanted["peak"])
        if shown["boxes"] != sum(word[0] in lengths for rank in words for word in rank):
            yield "%s: %d boxes" % (name, shown["boxes"])
        for rank, row in enumerate(shown["rows"]):
            if abs(float(row[2]) * chunks - (wanted["span"] - work)) > 0.05:
                yield "%s: rank %d waits %s" % (name, rank, row[2])
        if len(shown["rows"]) != stages:
            yield "%s: %d rows" % (name, len(shown["rows"]))
        if shown["picture"] == before:
            yield "%s: is drawn as the one before" % name
        before = shown["picture"]
    set_controls(browser, schedule="1f1b", stages=4, batches=8)  # rank 1 begins with a wait
    said = browser.value("""(() => {
        document.querySelectorAll("#drawing rect.wait[y='26']")[0].dispatchEvent(new PointerEvent("pointerdown"));
        return document.getElementById("said").textContent;
    })()""")
    if said != "Rank 1 waits 1 unit for the activations of micro-batch 0 from rank 0.":
        yield "a wait of rank 1 says: " + said


def list_problems(browser, folder):
    """The exported lists against what is known of them: every micro-batch once forward and once backward on each chunk,
    bubbles and peaks by the formulas of the papers."""
    text = browser.value("document.getElementById('schedules').textContent")
    schedules = json.loads(text)["schedules"]
    if len(text) > 500000 or len(schedules) != 8 * 16 * 6:
        yield "%d schedules of %d characters" % (len(schedules), len(text))
    for key, schedule in schedules.items():
        kind, stages, chunks, batches = key.split("/")
        stages, chunks, batches = int(stages), int(chunks), int(batches)
        if "error" in schedule:
            if kind in ("1f1b", "gpipe"):
                yield "%s: %s" % (key, schedule["error"])
            continue
        for rank, words in enumerate(schedule["ranks"]):
            actions = [word for word in words.split() if "<" not in word]
            for first, last in ("F", "B"), ("F", "I"), ("I", "W"):
                if (last in "IW") != (kind == "zb-h1"):
                    continue
                starts = {word[1:]: i for i, word in enumerate(actions) if word[0] == first}
                ends = {word[1:]: i for i, word in enumerate(actions) if word[0] == last}
                if set(starts) != set(ends) or len(starts) != batches * chunks:
                    yield "%s: rank %d has other forwards than backwards" % (key, rank)
                elif any(ends[one] < starts[one] for one in starts):
                    yield "%s: rank %d computes a backward before its forward" % (key, rank)
        bubble = {"zb-h1": None, "interleaved": (stages - 1) / (batches * chunks)}.get(kind, (stages - 1) / batches)
        if bubble is not None and abs(schedule["bubble"] - bubble) > 1e-5:
            yield "%s: bubble %s, by the formula %s" % (key, schedule["bubble"], bubble)
        peaks = {"1f1b": [min(stages - rank, batches) for rank in range(stages)], "gpipe": [batches] * stages}.get(kind)
        if peaks and schedule["peak"] != peaks:
            yield "%s: peaks %s, by the formula %s" % (key, schedule["peak"], peaks)


def answer_problems(browser, folder):
    """An answer of a chapter is folded, and unfolds."""
    browser.go("file://" + folder + "/notes/09-data-parallelism.html")
    heights = browser.value("""(() => [...document.querySelectorAll("details")].map(one => {
        const folded = one.offsetHeight;
        one.querySelector("summary").click();
        return [folded, one.offsetHeight];
    }))()""")
    if len(heights) < 3 or any(folded > 80 or unfolded < folded + 20 for folded, unfolded in heights):
        yield "heights folded and unfolded: %s" % heights


def main():
    folder, profile = os.path.abspath(sys.argv[1]), sys.argv[2]
    browser = Browser(profile)
    browser.open_tab()
    pages = check_pages(browser, folder)
    check("next_and_previous_lead_through_the_path", list(turn_problems(pages, folder)))
    check("explorer_redraws_and_shows_the_lists_numbers", list(explorer_problems(browser, folder)))
    check("schedules_are_those_of_the_papers", list(list_problems(browser, folder)))
    check("answers_are_folded", list(answer_problems(browser, folder)))
    browser.process.terminate()
    browser.process.wait()
    sys.exit(failed)


if __name__ == "__main__":
    main()
