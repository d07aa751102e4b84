"""Opens the page of a server whose model has a vision tower in headless Chromium, and shows it pictures:
serve_page_pictures.py PORT PROFILE. Prints "ok NAME" or "not ok NAME: REASON" for each property.
"""
import base64
import json
import sys

import book_check
from book_check import Browser, check
from serve_page import press, wait_for

PORT, PROFILE = int(sys.argv[1]), sys.argv[2]
FOLDER = "tests/golden/images/"
with open("tests/golden/vision/sft/answers.json") as golden:
    ANSWERS = json.load(golden)["answers"]


def file_of(name):
    """A script that makes the file."""
    with open(FOLDER + name, "rb") as file:
        code = base64.b64encode(file.read()).decode()
    kind = "image/jpeg" if name.endswith(".jpg") else "image/png"
    return "new File([Uint8Array.from(atob('%s'), c => c.charCodeAt(0))], '%s', {type: '%s'})" % (code, name, kind)


def begin(browser):
    browser.value("""at("clear").click(), at("tokens").value = 8, at("mode").value = "chat", at("temperature").value = 0,
                  at("input").value = "" """)


def choose(browser, *names):
    """Pictures by the input of files."""
    adds = "; ".join("box.items.add(%s)" % file_of(name) for name in names)
    browser.value("""(() => { const box = new DataTransfer(); %s; at("pictures").files = box.files;
        at("pictures").dispatchEvent(new Event("change")); })()""" % adds)


def drop(browser, file):
    browser.value("""(() => { const box = new DataTransfer(); box.items.add(%s);
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: box, bubbles: true, cancelable: true})); })()""" % file)


def pictures(browser, count):
    return wait_for(browser, "document.querySelectorAll('#shown img').length === %d" % count)


def say(browser, text):
    browser.value("at('input').focus()")
    browser.call("Input.insertText", text=text)
    press(browser, "Enter", "\r")
    wait_for(browser, "!running && document.querySelectorAll('[data-role=assistant]').length > 0")


def said(browser):
    return browser.value("[...document.querySelectorAll('.turn')].map(t => t.dataset.role + ': ' + t.textContent)")


def answer_problems(browser):
    """Chosen pictures stand before the text, and the answer is that of transformers; then one more in the talk."""
    for number, names, text in (0, ["square.png"], "What?"), (1, ["wide.png", "gray.png"], "Both?"), (3, ["photo.jpg"], "What?"):
        begin(browser)
        choose(browser, *names)
        if not pictures(browser, len(names)):
            return (yield "no pictures: " + browser.value("document.body.innerText"))
        say(browser, text)
        if said(browser) != ["user: " + text, "assistant: " + ANSWERS[number]["text"]]:
            yield "%s, and transformers says %s" % (said(browser), ANSWERS[number]["text"])
        if browser.value("document.querySelectorAll('[data-role=user] img').length") != len(names):
            yield "the turn shows no picture"
        if browser.value("document.querySelectorAll('#shown img').length") != 0:
            yield "pictures wait for another message"
    begin(browser)
    choose(browser, "square.png")
    pictures(browser, 1)
    say(browser, "What?")
    drop(browser, file_of("wide.png"))
    pictures(browser, 1)
    say(browser, "And?")
    if said(browser)[-1] != "assistant: " + ANSWERS[4]["text"]:
        yield "after a second picture: %s" % said(browser)


def taken_away_problems(browser):
    """A picture can be taken away by its button, all by New; a continuation has none."""
    begin(browser)
    choose(browser, "square.png", "wide.png")
    pictures(browser, 2)
    browser.value("document.querySelector('#shown button').click()")
    if not pictures(browser, 1):
        yield "it stays"
    browser.value("at('clear').click()")
    if browser.value("pictures.length") != 0:
        yield "New leaves it"
    browser.value("at('mode').value = 'text', at('mode').dispatchEvent(new Event('change'))")
    if not browser.value("at('pick').hidden"):
        yield "a continuation takes pictures"
    browser.value("at('mode').value = 'chat', at('mode').dispatchEvent(new Event('change'))")


def size_problems(browser):
    """A large picture is sent small, in its shape, and a file that is no picture is an error in words."""
    begin(browser)
    browser.value("""(async () => { const canvas = document.createElement("canvas"); canvas.width = 3000, canvas.height = 1500;
        canvas.getContext("2d").fillRect(0, 0, 9, 9);
        window.large = new File([await new Promise(done => canvas.toBlob(done))], "large.png", {type: "image/png"}); })()""")
    wait_for(browser, "!!window.large")
    drop(browser, "window.large")
    if not pictures(browser, 1):
        yield "no picture"
    size = browser.value("""createImageBitmap(new Blob([Uint8Array.from(atob(pictures[0].split(",")[1]),
        c => c.charCodeAt(0))])).then(b => [b.width, b.height])""")
    if size != [1024, 512] or not browser.value("pictures[0].startsWith('data:image/jpeg;base64,')"):
        yield "sent as %s" % size
    drop(browser, "new File(['text'], 'text.png', {type: 'image/png'})")
    if not wait_for(browser, "!!document.querySelector('[data-role=error]')"):
        yield "a text is a picture"


def main():
    browser = Browser(PROFILE)
    browser.open_tab()
    browser.go("http://127.0.0.1:%d/" % PORT)
    wait_for(browser, "!at('pick').hidden")
    check("pictures_of_the_page_are_answered_as_by_transformers", list(answer_problems(browser)))
    check("pictures_can_be_taken_away", list(taken_away_problems(browser)))
    check("large_pictures_are_sent_small", list(size_problems(browser)))
    browser.process.terminate()
    browser.process.wait()
    sys.exit(book_check.failed)


if __name__ == "__main__":
    main()
